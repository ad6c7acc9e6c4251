"""Benchmark of the LoRA kernels: ``python -m punica_core.bench.kernels --output DIR``.

Times are microseconds of one shrink and expand in a CUDA graph of dependent calls, median of several replays, with
weights that rotate through more memory than the L2 cache holds and warm activations. Floors are bytes (active adapters,
x once, y read and written) over 4.18 TB/s. Competitors with adapters repeat eight sets, which the cache may hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from punica_core.bench import plots, record
from punica_core.bench.competitors import Competitors
from punica_core.bench.lora_cases import (
    FLOOR_BYTES_PER_US,
    LLAMA_8B,
    Group,
    GroupCase,
    Step,
    adapter_bytes,
    floor_us,
    moved_bytes,
    time_graph_us,
)
from punica_core.bench.model_case import ModelCase, capture, replay_ms
from punica_core.bench.popularity import POPULARITIES
from punica_core.ops import cuda
from punica_core.stdout import until_unread

SECTIONS: Final = ("points", "groups", "model", "prefill")
_SHAPES: Final = ((4096, 4096), (4096, 14336), (14336, 4096))
_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
_MIXED: Final = (8, 16, 32, 64, 128)
_COMPETITOR_BATCHES: Final = (1, 8, 64)


def _line(row: dict[str, Any]) -> None:
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


def _steps(ranks: Sequence[int]) -> Iterator[tuple[str, int, Step]]:
    for batch in _BATCHES:
        for popularity in POPULARITIES:
            if batch == 1 and popularity != "distinct":
                continue
            if batch == 2 and popularity in ("uniform", "skewed"):
                continue
            yield popularity, batch, Step.of(popularity, batch, ranks)


def _time(case: GroupCase) -> float:
    return round(time_graph_us(case, min(max(case.num_sets, 48), 256)), 2)


def measure_points(peers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One projection at lora_rank 16 and 64; beside other systems' times where ``peers`` has the point."""
    known = {(p["fin"], p["fout"], p["rank"], p["batch"], p["mode"]): p for p in peers}
    rows = []
    for rank in (16, 64):
        for fin, fout in _SHAPES:
            for popularity, batch, step in _steps([rank]):
                group = Group("projection", fin, (fout,))
                peer = known.get((fin, fout, rank, batch, popularity))
                floor = peer["floor_us"] if peer else round(floor_us(group, step), 2)
                row: dict[str, Any] = {"in": fin, "out": fout, "rank": rank, "popularity": popularity, "batch": batch}
                row |= {"us": _time(GroupCase(group, step, torch.bfloat16)), "floor": floor}
                row["target"] = round(1.4 * floor + 4, 2)
                row |= _bandwidth(group, step, row["us"])
                if peer:
                    row["best_peer"] = min(us for name, us in peer["us"].items() if name != "base")
                rows.append(row)
                _line(row)
    return rows


def measure_groups(*, competitors: bool = True) -> list[dict[str, Any]]:
    """Fused groups of Llama-3.1-8B; ``competitors``: those of 1, 8 and 64 rows beside what else there is."""
    rows = []
    for group in LLAMA_8B:
        for ranks in ((8,), (16,), (32,), (64,), (128,), _MIXED):
            for popularity, batch, step in _steps(ranks):
                case = GroupCase(group, step, torch.bfloat16)
                floor = floor_us(group, step)
                row: dict[str, Any] = {"group": group.name, "ranks": list(ranks), "popularity": popularity}
                row |= {"batch": batch, "us": _time(case), "floor": round(floor, 2)}
                row["target"] = round(1.2 * floor + 5, 2)
                row |= _bandwidth(group, step, row["us"])
                if competitors and batch in _COMPETITOR_BATCHES:
                    row |= _measure_competitors(case)
                rows.append(row)
                _line(row)
    return rows


def _bandwidth(group: Group, step: Step, us: float) -> dict[str, float]:
    """Bytes that a call moves, and the share of the memory bandwidth that this is in ``us`` microseconds."""
    moved = moved_bytes(group, step)
    return {"bytes": moved, "bandwidth_share": round(moved / us / FLOOR_BYTES_PER_US, 3)}


def _measure_competitors(case: GroupCase) -> dict[str, float]:
    """Microseconds of base product, cuBLAS loop and gather + bmm, as far as the GPU's memory has room for each."""
    others = Competitors(case)
    calls_of = {"base": (others.base, 32), "loop": (others.loop, 8), "gather_bmm": (others.gather_bmm, 8)}
    out: dict[str, float] = {}
    for name, (call, calls) in calls_of.items():
        with contextlib.suppress(torch.OutOfMemoryError):
            out[name] = round(time_graph_us(call, calls), 2)
    return out


def measure_model() -> list[dict[str, Any]]:
    """Time that all seven projections of 32 layers add to the base products in one graph, lora_rank 16."""
    rows = []
    for popularity, batch in (("identical", 1), ("identical", 64), ("distinct", 8), ("distinct", 64)):
        step = Step.of(popularity, batch, [16])
        case = ModelCase(step)
        case.check(case.inside)
        runs = (case.base, case.chained, case.early, case.forked, case.beside, case.inside)
        base, chained, early, forked, beside, inside = replay_ms([capture(run) for run in runs])
        floor = case.num_layers * sum(adapter_bytes(group, step.ranks) for group in LLAMA_8B) / FLOOR_BYTES_PER_US
        row: dict[str, Any] = {"popularity": popularity, "batch": batch, "base_ms": round(base, 3)}
        row |= {"chained_ms": round(chained - base, 3), "early_ms": round(early - base, 3)}
        row |= {"forked_ms": round(forked - base, 3), "beside_ms": round(beside - base, 3)}
        row["inside_ms"] = round(inside - base, 3)
        row["floor_ms"] = round(floor / 1000, 3)
        rows.append(row)
        _line(row)
    return rows


def measure_prefill() -> list[dict[str, Any]]:
    """Share that LoRA adds to the base products of two layers, behind them and ahead; prompts of equal length."""
    rows = []
    for num_rows in (1024, 2048, 4096, 8192):
        for segments in (1, 4, 16):
            for rank in (16, 64):
                step = Step((num_rows // segments,) * segments, (rank,) * segments)
                case = ModelCase(step, num_layers=2)
                case.check(case.ahead)
                base, chained, ahead = replay_ms([capture(run) for run in (case.base, case.chained, case.ahead)])
                row: dict[str, Any] = {"rows": num_rows, "segments": segments, "rank": rank}
                row |= {"base_ms": round(base / 2, 3), "added_percent": round(100 * (chained - base) / base, 1)}
                row["ahead_added_percent"] = round(100 * (ahead - base) / base, 1)
                rows.append(row)
                _line(row)
    return rows


def summarise(points: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How the points stand against target and the best other system."""
    ratios = [row["best_peer"] / row["us"] for row in points if "best_peer" in row]
    out: dict[str, float] = {
        "points": len(points),
        "over_target": sum(row["us"] > row["target"] for row in points),
        "worst_ratio_to_target": round(max(row["us"] / row["target"] for row in points), 3),
    }
    if ratios:
        out["speedup_over_best_peer"] = round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 3)
        out["slower_than_best_peer"] = sum(ratio < 1 for ratio in ratios)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of the module."""
    parser = argparse.ArgumentParser(prog="punica bench kernels", description=__doc__)
    parser.add_argument("--section", action="append", choices=SECTIONS, help="default: all")
    parser.add_argument("--only-ours", action="store_true", help="leave out the competitors beside fused groups")
    parser.add_argument("--peers", type=Path, help="JSON lines of other systems' times")
    parser.add_argument("--library", type=Path, help="compiled kernels; default: prebuilt or built on the spot")
    parser.add_argument("--output", type=Path, default=Path("benchmarks"), help="directory of kernels.json and .png")
    words = sys.argv[1:] if argv is None else list(argv)
    args = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("the kernel benchmark needs an NVIDIA GPU; torch sees none", file=sys.stderr)
        return 1
    cuda.load(args.library)
    sections = args.section or SECTIONS
    result: dict[str, Any] = {"provenance": record.provenance(("bench", "kernels", *words))}
    result |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    if "points" in sections:
        peers = [json.loads(line) for line in args.peers.read_text().splitlines()] if args.peers else []
        result["points"] = measure_points(peers)
        result["summary"] = summarise(result["points"])
    if "groups" in sections:
        result["groups"] = measure_groups(competitors=not args.only_ours)
        result["groups_summary"] = summarise(result["groups"])
    if "model" in sections:
        result["model"] = measure_model()
    if "prefill" in sections:
        result["prefill"] = measure_prefill()
    record.write(args.output / "kernels.json", result)
    if "points" in sections:
        plots.save(
            args.output / "kernels.png",
            lambda axes: plots.roofline(axes, result["points"]),
            f"LoRA of one layer, {result['device']}",
        )
    for summary in ("summary", "groups_summary"):
        if summary in result:
            print(json.dumps(result[summary]))
    return 0


if __name__ == "__main__":
    sys.exit(until_unread(main))
