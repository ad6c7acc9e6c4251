"""Several builds of the kernels side by side: ``python -m punica_core.bench.kernel_variants NAME=LIBRARY …``.

Each build is loaded in a process of its own, checked against the reference, then timed. The table comes last.
A build that was measured before is given as the JSON file that has its name: ``old=kernel-variants-h200.json``.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import torch

from punica_core.bench.lora_cases import LLAMA_8B, Group, GroupCase, Step, floor_us, time_graph_us
from punica_core.bench.model_case import EngineMemory, ModelCase, WrongResult, capture, replay_ms
from punica_core.ops import reference
from punica_core.stdout import until_unread

Times = dict[str, float]

SECTIONS: Final = ("points", "groups", "parts", "model", "engine", "prefill")
_SHAPES: Final = ((4096, 4096), (4096, 14336), (14336, 4096))
_STEPS: Final = (
    *(("identical", batch) for batch in (1, 8, 32, 64, 128)),
    *(("uniform", batch) for batch in (64, 128)),
    *(("skewed", batch) for batch in (8, 128)),
    *(("distinct", batch) for batch in (8, 64)),
)
_MODEL_STEPS: Final = (
    ("identical", 1),
    ("identical", 8),
    ("identical", 64),
    ("distinct", 4),
    ("distinct", 8),
    ("distinct", 64),
)
_MEMORIES: Final = (
    ("compact", None),
    ("engine", EngineMemory()),
    ("by module", EngineMemory(by_slot=False)),
    ("wide", EngineMemory(own_rank=False)),
    ("both", EngineMemory(by_slot=False, own_rank=False)),
)
_TOLERANCE: Final = 0.03
"""Of max(1, the largest output): both sides round y once and the low-rank row once, in different places."""


def _check_steps() -> Iterator[tuple[Group, Step]]:
    mixed = (1, 2, 3, 5, 8, 16, 33, 64, 128, 256)
    narrow = Group("narrow", 1032, (520, 72))
    for counts in ((1,), (7, 1, 9, 33), (64,), (1, 127), (130, 40), (200,), (3,) * 40, (1,) * 64):
        yield narrow, Step(counts, tuple(mixed[(3 * i + 5) % 10] for i in range(len(counts))))
    for rank in mixed:
        yield narrow, Step((1, 16, 40), (rank,) * 3)
        yield narrow, Step((300, 5, 70), (rank,) * 3)
    yield Group("uneven", 1001, (777, 50)), Step((3, 40), (20, 5))
    yield Group("uneven", 1001, (777, 50)), Step((300, 40), (20, 5))
    for group in LLAMA_8B:
        yield group, Step.of("skewed", 64, (16, 64, 8))


def check() -> int:
    """Compare eager, replayed and repeated results with the reference; returns how many cases were compared.

    Raises:
        WrongResult: a case differs, or is not bitwise repeatable.
    """
    cases = [(*case, summed) for case in _check_steps() for summed in (False, True)]
    for group, step, summed in cases:
        case = GroupCase(group, step, torch.bfloat16, summed=summed)
        case.x.normal_()
        case.adapters.arena.mul_(64)  # as large as y
        start = torch.randn_like(case.y)
        common = (case.adapters.arena, case.adapters.tables[0], case.plan.plan)
        want = start.clone()
        reference.lora_shrink(case.v, case.x, *common, case.max_rank)
        reference.lora_expand(want, case.v, *common, list(group.out_features), group.in_features, case.max_rank)
        results = []
        case.v.fill_(torch.nan)
        for _ in range(2):
            case.y.copy_(start)
            case(0)
            results.append(case.y.clone())
        graph = capture(lambda case=case: case(0))  # type: ignore[misc]
        case.y.copy_(start)
        graph.replay()
        results.append(case.y.clone())
        error = float((results[0].float() - want.float()).abs().max())
        if not error <= _TOLERANCE * max(1.0, float(want.abs().max())):
            raise WrongResult(f"{group.name} {step}: off by {error}")
        if not all(torch.equal(result, results[0]) for result in results):
            raise WrongResult(f"{group.name} {step}: not the same bits every time")
        if torch.equal(results[0], start):
            raise WrongResult(f"{group.name} {step}: nothing was added")
    return len(cases)


def _calls(case: GroupCase) -> int:
    return min(max(case.num_sets, 48), 128)


def measure_points() -> Times:
    """Microseconds of shrink and expand of one projection."""
    out: Times = {}
    for rank in (16, 64):
        for fin, fout in _SHAPES:
            for popularity, batch in _STEPS:
                step = Step.of(popularity, batch, [rank])
                case = GroupCase(Group("projection", fin, (fout,)), step, torch.bfloat16)
                out[f"{fin}→{fout} r{rank} {popularity} {batch}"] = time_graph_us(case, _calls(case), replays=7)
    return out


def measure_groups() -> Times:
    """Microseconds of shrink and expand of fused groups."""
    out: Times = {}
    for group in (LLAMA_8B[0], LLAMA_8B[2]):
        for ranks in ((8,), (16,), (64,), (8, 16, 32, 64, 128)):
            for popularity, batch in (("identical", 64), ("uniform", 128), ("distinct", 8), ("distinct", 64)):
                case = GroupCase(group, Step.of(popularity, batch, ranks), torch.bfloat16)
                name = "mixed" if len(ranks) > 1 else f"r{ranks[0]}"
                out[f"{group.name} {name} {popularity} {batch}"] = time_graph_us(case, _calls(case), replays=7)
    return out


def measure_parts() -> Times:
    """Microseconds of shrink alone and of expand alone."""
    out: Times = {}
    steps = (
        ("gate_up r16 distinct 64", LLAMA_8B[2], Step.of("distinct", 64, [16])),
        ("down r64 identical 128", LLAMA_8B[3], Step.of("identical", 128, [64])),
        ("o r16 identical 64", LLAMA_8B[1], Step.of("identical", 64, [16])),
        ("o r16 identical 1", LLAMA_8B[1], Step.of("identical", 1, [16])),
        ("gate_up r16 prompt 4096", LLAMA_8B[2], Step((4096,), (16,))),
        ("gate_up r64 prompt 4096", LLAMA_8B[2], Step((4096,), (64,))),
    )
    for name, group, step in steps:
        case = GroupCase(group, step, torch.bfloat16)
        calls = 8 if step.num_rows > 256 else _calls(case)
        out[f"shrink {name}"] = time_graph_us(case.shrink, calls, replays=7)
        out[f"expand {name}"] = time_graph_us(case.expand, calls, replays=7)
    return out


def measure_model() -> Times:
    """Milliseconds that LoRA of 32 layers adds to the base products, by the order of kernels in the graph."""
    out: Times = {}
    for popularity, batch in _MODEL_STEPS:
        case = ModelCase(Step.of(popularity, batch, [16]))
        case.check(case.inside)
        names = ["base", "chained", "early"]
        graphs = [capture(case.base), capture(case.chained)]
        want = [y.clone() for y in case.y]
        graphs.append(capture(case.early))
        wants = [want, want]
        others: dict[str, Callable[[], None]] = {
            "beside": case.beside,
            "not summed": functools.partial(case.beside, summed=False),
            "inside": case.inside,
        }
        for name, order in others.items():
            order()
            wants.append([y.clone() for y in case.y])
            graphs.append(capture(order))
            names.append(name)
        for name, graph, expected in zip(names[1:], graphs[1:], wants, strict=True):
            for _ in range(3):
                for y in case.y:
                    y.fill_(torch.nan)
                graph.replay()
                if not all(map(torch.equal, case.y, expected)):
                    raise WrongResult(f"{popularity} {batch}: {name} is not what it is without a graph, bit for bit")
        times = replay_ms(graphs)
        out[f"base {popularity} {batch}"] = times[0]
        out |= {f"{name} {popularity} {batch}": ms - times[0] for name, ms in zip(names[1:], times[1:], strict=True)}
        del case, graphs
        torch.cuda.empty_cache()
    return out


def measure_engine() -> Times:
    """As measure_model, with adapters, tables and scratch where the engine has them, and as it had them."""
    out: Times = {}
    for popularity, batch in _MODEL_STEPS:
        for name, memory in _MEMORIES:
            case = ModelCase(Step.of(popularity, batch, [16]), memory=memory)
            graphs = [capture(case.base), capture(case.chained)]
            case.beside()
            want = [y.clone() for y in case.y]
            graphs.append(capture(case.beside))
            if not all(map(torch.equal, case.y, want)):
                raise WrongResult(f"{name} {popularity} {batch}: beside is not what it is without a graph, bit for bit")
            base, chained, beside = replay_ms(graphs)
            out[f"{name} chained {popularity} {batch}"] = chained - base
            out[f"{name} beside {popularity} {batch}"] = beside - base
            del case, graphs
            torch.cuda.empty_cache()
    return out


def measure_prefill() -> Times:
    """Percent that LoRA adds to the base products of two layers, behind them and ahead of them."""
    out: Times = {}
    for num_rows in (1024, 4096):
        for segments in (1, 16):
            for rank in (16, 64):
                case = ModelCase(Step((num_rows // segments,) * segments, (rank,) * segments), num_layers=2)
                case.check(case.ahead)
                base, *orders = replay_ms([capture(run) for run in (case.base, case.chained, case.ahead)], replays=15)
                for name, ms in zip(("prompt", "ahead"), orders, strict=True):
                    out[f"{name} {num_rows} / {segments} r{rank}"] = 100 * (ms - base) / base
    return out


_MEASURES: Final[dict[str, Callable[[], Times]]] = {
    "points": measure_points,
    "groups": measure_groups,
    "parts": measure_parts,
    "model": measure_model,
    "engine": measure_engine,
    "prefill": measure_prefill,
}


def measure(library: Path, sections: Sequence[str], output: Path) -> None:
    """Check and time one build; writes after each section, so that a late failure keeps what came before."""
    torch.ops.load_library(str(library))
    print(f"{library.name}: {check()} cases equal the reference", flush=True)
    result: dict[str, Times] = {}
    for section in sections:
        begin = time.monotonic()
        result[section] = {name: round(value, 3) for name, value in _MEASURES[section]().items()}
        output.write_text(json.dumps(result))
        print(f"{library.name}: {section} took {time.monotonic() - begin:.0f} s", flush=True)


def _targets() -> Times:
    out: Times = {}
    for rank in (16, 64):
        for fin, fout in _SHAPES:
            for popularity, batch in _STEPS:
                floor = floor_us(Group("projection", fin, (fout,)), Step.of(popularity, batch, [rank]))
                out[f"{fin}→{fout} r{rank} {popularity} {batch}"] = 1.4 * floor + 4
    return out


def print_table(results: dict[str, dict[str, Times]]) -> None:
    """One line a case and one column a build."""
    names = list(results)
    targets = _targets()
    print(f"{'case':30}" + "".join(f"{name:>8}" for name in names) + f"{'target':>8}")
    for section in SECTIONS:
        rows = dict.fromkeys(case for name in names for case in results[name].get(section, {}))
        for case in rows:
            cells = [results[name].get(section, {}).get(case) for name in names]
            target = f"{targets[case]:8.2f}" if case in targets else ""
            print(f"{case:30}" + "".join(f"{'-' if cell is None else f'{cell:.2f}':>8}" for cell in cells) + target)
    first = results[names[0]].get("points", {})
    for name in names:
        points = results[name].get("points", {})
        if points and first:
            ratio = math.exp(sum(math.log(points[case] / first[case]) for case in points) / len(points))
            over = sum(us > targets[case] for case, us in points.items())
            print(f"{name}: {ratio:.3f} of {names[0]}'s time, {over} of {len(points)} points above target")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of the module."""
    parser = argparse.ArgumentParser(prog="python -m punica_core.bench.kernel_variants", description=__doc__)
    parser.add_argument("builds", nargs="*", metavar="NAME=LIBRARY[:SECTION,…]", help="sections default to all")
    parser.add_argument("--output", type=Path, default=Path("kernel_variants.json"))
    parser.add_argument("--measure", nargs=3, metavar=("LIBRARY", "SECTIONS", "JSON"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        library, sections, output = args.measure
        measure(Path(library), sections.split(","), Path(output))
        return 0
    results: dict[str, dict[str, Times]] = {}
    failed = False
    for build in args.builds:
        name, _, rest = build.partition("=")
        library, _, sections = rest.partition(":")
        if library.endswith(".json"):
            results[name] = json.loads(Path(library).read_text())[name]
            continue
        part = args.output.with_suffix(f".{name}.json")
        command = [sys.executable, "-m", "punica_core.bench.kernel_variants"]
        command += ["--measure", library, sections or ",".join(SECTIONS), str(part)]
        failed |= subprocess.run(command, check=False).returncode != 0
        if part.is_file():
            results[name] = json.loads(part.read_text())
            part.unlink()
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    if results:
        print_table(results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(until_unread(main))
