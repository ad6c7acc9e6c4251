"""A run as a picture, as a few lines of text, and as a row of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.bench.load import Run


def text_lines(summary: dict[str, Any]) -> list[str]:
    """The figures that one looks at first."""
    lines = [
        f"{summary['completed']} of {summary['requests']} requests completed in {summary['seconds']:.1f} s, "
        f"{summary['generated_tokens_per_second']:.0f} generated tokens/s, "
        f"{summary['requests_per_second']:.2f} requests/s",
    ]
    for name in ("ttft_ms", "inter_token_ms", "time_per_token_ms", "latency_ms"):
        if figures := summary[name]:
            shown = "  ".join(f"{key} {value:.1f}" for key, value in figures.items())
            lines.append(f"{name:18} {shown}")
    if summary["errors"]:
        lines.append("errors             " + ", ".join(f"{kind}: {n}" for kind, n in summary["errors"].items()))
    if summary["not_sent"]:
        lines.append(f"not sent           {summary['not_sent']} (max_seconds was over)")
    if summary["client_is_bottleneck"]:
        late = summary["client_lag_ms"]["p99"] if summary["client_lag_ms"] else 0.0
        lines.append(
            f"The client used {summary['client_cpu']:.0%} of a core and was {late:.0f} ms late at p99: "
            "it may limit these figures."
        )
    return lines


def table(summaries: Mapping[str, dict[str, Any]]) -> str:
    """A Markdown table, a row for each run."""
    columns = ("requests/s", "tokens/s", "TTFT p50", "p99", "inter-token p50", "p99 ms", "not completed")
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for name, summary in summaries.items():
        cells = [f"{summary['requests_per_second']:.2f}", f"{summary['generated_tokens_per_second']:.0f}"]
        for kind in ("ttft_ms", "inter_token_ms"):
            figures = summary[kind] or {}
            cells += [f"{figures[p]:.1f}" if p in figures else "" for p in ("p50", "p99")]
        cells.append(str(summary["requests"] - summary["completed"]))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(path: Path, run: Run, title: str) -> None:
    """A PNG: cumulative TTFT and gaps between tokens, tokens a second over time, requests in flight."""
    from matplotlib.figure import Figure  # an extra: JSON needs no plotting library

    complete = [outcome for outcome in run.outcomes if not outcome.error and outcome.arrivals]
    figure = Figure(figsize=(11, 7), layout="constrained")
    (ttft, gaps), (tokens, flight) = figure.subplots(2, 2)
    _cumulative(ttft, [outcome.ttft for outcome in complete], "TTFT from the planned arrival (ms)")
    _cumulative(gaps, [gap for outcome in complete for gap in outcome.gaps], "time between pieces of a stream (ms)")
    arrivals = [at for outcome in complete for at in outcome.arrivals]
    edges = np.linspace(0, max(run.seconds, 1e-9), 61)
    weights = [
        outcome.completion_tokens / len(outcome.arrivals) for outcome in complete for _ in range(len(outcome.arrivals))
    ]
    counts, _ = np.histogram(arrivals, edges, weights=weights)
    tokens.stairs(counts / np.diff(edges), edges, fill=True, alpha=0.5)
    tokens.set(xlabel="seconds", ylabel="generated tokens/s")
    _in_flight(flight, [(outcome.planned, outcome.ended) for outcome in run.outcomes])
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _cumulative(axes: Any, seconds: Sequence[float], label: str) -> None:
    values = np.sort(np.asarray(seconds)) * 1e3
    if len(values):
        axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post")
        axes.set_xscale("log")
    axes.set(xlabel=label, ylabel="share", ylim=(0, 1))
    axes.grid(alpha=0.3)


def _in_flight(axes: Any, spans: Sequence[tuple[float, float]]) -> None:
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    axes.step([at for at, _ in changes], np.cumsum([change for _, change in changes]), where="post")
    axes.set(xlabel="seconds", ylabel="requests in flight")
