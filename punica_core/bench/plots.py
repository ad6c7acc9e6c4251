"""Pictures of what the in-process benchmarks measured; they need matplotlib, an extra."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from punica_core.extras import how_to_install


def say_no_picture() -> None:
    """What to install for one, on stderr."""
    print(f"no picture: {how_to_install('bench')}", file=sys.stderr)


def save(path: Path, draw: Callable[[Any], None], title: str) -> None:
    """Let `draw` fill the axes of a new picture. Without matplotlib, says how to get it."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        say_no_picture()
        return
    figure = Figure(figsize=(8, 5), layout="constrained")
    draw(figure.subplots())
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def decode(axes: Any, points: Sequence[Mapping[str, Any]], known: Mapping[str, Any]) -> None:
    """Median step by batch, a line for each popularity; another system's dashed."""
    for index, name in enumerate(dict.fromkeys(point["popularity"] for point in points)):
        chosen = sorted(
            (p["batch"], p["median_ms"], p["p10_ms"], p["p90_ms"]) for p in points if p["popularity"] == name
        )
        batches, medians, low, high = zip(*chosen, strict=True)
        axes.plot(batches, medians, "o-", color=f"C{index}", label=name)
        axes.fill_between(batches, low, high, color=f"C{index}", alpha=0.15)
    for index, (name, figures) in enumerate(known.get("figures", {}).items()):
        axes.plot(
            list(figures), list(figures.values()), "--", lw=1, color=f"C{index}", label=f"{known['system']}, {name}"
        )
    axes.set_xscale("log", base=2)
    axes.set(xlabel="batch", ylabel="decode step, ms (median, 10–90 %)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def throughput(axes: Any, rows: Mapping[str, Mapping[str, Any]], known: Mapping[str, Any]) -> None:
    """Generated tokens a second, a bar for each system beside another one's."""
    names, theirs = list(rows), known.get("figures", {})
    places = range(len(names))
    axes.bar([at - 0.2 for at in places], [rows[n]["generated_tokens_per_second"] for n in names], 0.4, label="ours")
    if theirs:
        axes.bar([at + 0.2 for at in places], [theirs.get(n, 0.0) for n in names], 0.4, label=known["system"])
    axes.set_xticks(list(places), names)
    axes.set(ylabel="generated tokens/s")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)


def sweep(axes: Any, points: Sequence[Mapping[str, Any]]) -> None:
    """Generated tokens a second by number of adapters, a line for each batch."""
    for batch in sorted({point["batch"] for point in points}):
        chosen = sorted((p["adapters"], p["generated_tokens_per_second"]) for p in points if p["batch"] == batch)
        adapters, speeds = zip(*chosen, strict=True)
        axes.plot(adapters, speeds, "o-", label=f"batch {batch}")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="adapters", ylabel="generated tokens/s", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def roofline(axes: Any, points: Sequence[Mapping[str, Any]]) -> None:
    """Time over floor of every point of the kernels, µs, with the target's line."""
    for popularity in dict.fromkeys(point["popularity"] for point in points):
        chosen = [row for row in points if row["popularity"] == popularity]
        axes.scatter([row["floor"] for row in chosen], [row["us"] for row in chosen], s=14, label=popularity)
    peers = [row for row in points if "best_peer" in row]
    axes.scatter([r["floor"] for r in peers], [r["best_peer"] for r in peers], s=6, c="lightgrey", label="best other")
    floors = sorted(row["floor"] for row in points)
    axes.plot(floors, floors, "k-", lw=1, label="floor at 4.18 TB/s")
    axes.plot(floors, [1.4 * floor + 4 for floor in floors], "k--", lw=1, label="1.4 × floor + 4 µs")
    axes.set(xscale="log", yscale="log", xlabel="byte floor, µs", ylabel="shrink + expand, µs")
    axes.legend()
