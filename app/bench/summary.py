"""Figures of a run: throughput, latency percentiles, errors by kind."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from app.bench.load import Run
from app.bench.stream import Outcome
from punica_core.bench.latency import percentiles

BUSY_CLIENT: Final = 0.9
LATE_CLIENT_MS: Final = 50.0
"""Share of one core, and lateness of its timers at p99, above which the client may be what limits the figures."""


def summarize(run: Run) -> dict[str, Any]:
    """JSON-ready figures. Latencies are of complete streams, from the planned arrival; tokens a second are those of
    complete streams over the whole run. inter_token_ms: gaps between pieces of a stream. time_per_token_ms: of each
    stream, from its first event to its end over its tokens but the first."""
    complete = [outcome for outcome in run.outcomes if not outcome.error]
    lag = percentiles(run.client_lags)
    generated = sum(outcome.completion_tokens for outcome in complete)
    return {
        "requests": len(run.outcomes) + run.not_sent,
        "completed": len(complete),
        "not_sent": run.not_sent,
        "errors": dict(sorted(Counter(outcome.error for outcome in run.outcomes if outcome.error).items())),
        "by_model": dict(sorted(Counter(outcome.model for outcome in run.outcomes).items())),
        "seconds": run.seconds,
        "requests_per_second": len(complete) / run.seconds,
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in complete),
        "generated_tokens": generated,
        "generated_tokens_per_second": generated / run.seconds,
        "ttft_ms": percentiles([outcome.ttft for outcome in complete if outcome.arrivals]),
        "inter_token_ms": percentiles([gap for outcome in complete for gap in outcome.gaps]),
        "time_per_token_ms": percentiles([spacing for outcome in complete if (spacing := _spacing(outcome))]),
        "latency_ms": percentiles([outcome.latency for outcome in complete]),
        "send_delay_ms": percentiles([outcome.sent - outcome.planned for outcome in run.outcomes]),
        "client_cpu": run.client_cpu,
        "client_lag_ms": lag,
        "client_is_bottleneck": run.client_cpu > BUSY_CLIENT or (lag is not None and lag["p99"] > LATE_CLIENT_MS),
    }


def _spacing(outcome: Outcome) -> float | None:
    if outcome.completion_tokens < 2 or not outcome.arrivals:
        return None
    return (outcome.ended - outcome.arrivals[0]) / (outcome.completion_tokens - 1)
