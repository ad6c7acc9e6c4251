"""`punica bench decode`: how long a decode step takes, by batch and popularity of the adapters.

Sequences of equal prompts' length run in one engine in this process until all of them decode; then the time between
consecutive ends of steps is measured. Popularity off: an engine without LoRA, in a process of its own; base: LoRA on,
no row has an adapter; identical, skewed, uniform, distinct: as in the Punica paper, over the batch. Weights and
adapters are random and made in memory.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from punica_core.bench import peers, plots, record
from punica_core.bench.device_time import profile_steps
from punica_core.bench.parts import BASE, OFF, check_systems, device_name, measured_apart
from punica_core.bench.session import EngineChoice, Session, add_engine_flags, int_list, name_list, open_session
from punica_core.bench.workload import assign_models
from punica_core.errors import PunicaError
from punica_core.protocol import AdapterRef, NewSequence
from punica_core.stdout import until_unread

PROFILED_STEPS: Final = 16
SPARE_STEPS: Final = 16


def measure_point(
    session: Session,
    batch: int,
    popularity: str,
    *,
    prompt_tokens: int,
    budget: int,
    warmup: int,
    steps: int,
    seed: int,
) -> dict[str, Any]:
    """One batch and popularity. Raises RuntimeError if a timed step does not give every sequence one token."""
    refs = adapters_of(session, popularity, batch)
    # One that comes late would find the others, which decode meanwhile, at their ends.
    session.preload(dict.fromkeys(ref for ref in refs if ref is not None))
    new_tokens = new_tokens_of(batch, prompt_tokens, budget, warmup + steps + PROFILED_STEPS)
    requests = make_requests(session, refs, prompt_tokens, new_tokens, seed)
    gc.collect()  # what was before is not this point's
    session.submit(requests)
    try:
        prefill(session, batch)
        for _ in range(warmup):
            decode_step(session, batch)
        ends = [time.perf_counter()]
        for _ in range(steps):
            decode_step(session, batch)
            ends.append(time.perf_counter())
        on_gpu = session.layout.device.startswith("cuda")
        device = profile_steps(lambda: decode_step(session, batch), PROFILED_STEPS) if on_gpu else None
    finally:
        session.cancel(requests)
    milliseconds = np.diff(ends) * 1e3
    return {
        "batch": batch,
        "popularity": popularity,
        "adapters": len({ref for ref in refs if ref is not None}),
        "median_ms": float(np.median(milliseconds)),
        "p10_ms": float(np.percentile(milliseconds, 10)),
        "p90_ms": float(np.percentile(milliseconds, 90)),
        "max_ms": float(milliseconds.max()),
        "steps": steps,
        "device": device,
    }


def adapters_of(session: Session, popularity: str, batch: int) -> list[AdapterRef | None]:
    """The adapter of each sequence; those of a popularity with more adapters than there are wrap around."""
    if popularity in (OFF, BASE):
        return [None] * batch
    by_name = {ref.name: ref for ref in session.adapters.refs}
    return [by_name[name] for name in assign_models(popularity, tuple(by_name), batch)]


def make_requests(
    session: Session, refs: Sequence[AdapterRef | None], prompt_tokens: int, new_tokens: int, seed: int
) -> list[NewSequence]:
    """Random prompts, no two alike."""
    generator = np.random.Generator(np.random.PCG64([seed, len(refs)]))
    prompts = generator.integers(3, session.layout.vocab_size, (len(refs), prompt_tokens))
    return [session.request(prompt.tolist(), new_tokens, ref) for prompt, ref in zip(prompts, refs, strict=True)]


def new_tokens_of(batch: int, prompt_tokens: int, budget: int, steps: int) -> int:
    """Tokens that a sequence needs to decode until the last prompt of the batch is computed, and `steps` more.

    A step leaves the prompts its budget without the decoding rows.
    """
    return -(-batch * prompt_tokens // (budget - batch)) + SPARE_STEPS + steps


def prefill(session: Session, batch: int) -> None:
    """Step until every sequence has its first token."""
    started: set[int] = set()
    while len(started) < batch:
        started.update(output.request_id for output in session.step() if output.token_ids)


def decode_step(session: Session, batch: int) -> None:
    tokens = sum(len(output.token_ids) for output in session.step())
    if tokens != batch:
        raise RuntimeError(f"a decode step of {batch} sequences gave {tokens} tokens; it cannot be timed as one.")


def table(points: Sequence[dict[str, Any]], known: dict[str, Any]) -> str:
    """Markdown: a row for each batch, median ms by popularity and what it adds to `off`; other systems below."""
    times = {(point["popularity"], point["batch"]): point["median_ms"] for point in points}
    columns = list(dict.fromkeys(point["popularity"] for point in points))
    batches = sorted({point["batch"] for point in points})
    lines = [f"| batch | {' | '.join(columns)} |", "|---:|" + "---:|" * len(columns)]
    for batch in batches:
        cells = [_cell(times.get((name, batch)), times.get((OFF, batch)), name) for name in columns]
        lines.append(f"| {batch} | {' | '.join(cells)} |")
    for name, figures in known.get("figures", {}).items():
        shown = ", ".join(f"{batch}: {ms:g}" for batch, ms in figures.items() if batch in batches)
        if shown:
            lines.append(f"\n{known['system']}, {name}: {shown}")
    return "\n".join(lines)


def _cell(ms: float | None, off: float | None, name: str) -> str:
    if ms is None:
        return ""
    return f"{ms:.3f}" + (f" ({ms / off - 1:+.1%})" if off and name != OFF else "")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="punica bench decode", description=__doc__)
    add_engine_flags(found)
    found.add_argument("--batches", type=int_list, default=(1, 8, 32, 64, 128))
    found.add_argument("--systems", type=name_list, default=(OFF, BASE, "identical", "distinct"), help="popularities")
    found.add_argument("--prompt-tokens", type=int, default=128)
    found.add_argument("--warmup", type=int, default=16, help="decode steps before the timed ones")
    found.add_argument("--steps", type=int, default=128, help="timed steps of each point")
    found.add_argument("--out", type=Path, default=Path("benchmarks/decode.json"))
    return found


def budget_of(options: argparse.Namespace) -> int:
    """Tokens of a step: as asked for, but so many that prompts advance beside the largest batch."""
    budget: int = max(options.max_num_batched_tokens, 2 * max(options.batches))
    return budget


def choice_of(options: argparse.Namespace, num_adapters: int) -> EngineChoice:
    """The engine for all batches: room for the longest sequence of the largest one."""
    largest, steps = max(options.batches), options.warmup + options.steps + PROFILED_STEPS
    new_tokens = new_tokens_of(largest, options.prompt_tokens, budget_of(options), steps)
    return EngineChoice(
        model=options.model,
        device=options.device,
        dtype=options.dtype,
        num_adapters=num_adapters,
        lora_ranks=options.lora_ranks,
        max_num_seqs=largest,
        max_num_batched_tokens=budget_of(options),
        max_model_len=options.prompt_tokens + new_tokens,
        kv_tokens=options.kv_tokens,
        seed=options.seed,
    )


def measure(session: Session, options: argparse.Namespace, systems: Sequence[str]) -> list[dict[str, Any]]:
    """Every point of these popularities on one engine."""
    session.preload(session.adapters.refs)
    points: list[dict[str, Any]] = []
    for batch in options.batches:
        for popularity in systems:
            if batch == 1 and popularity != "identical" and popularity not in (OFF, BASE):
                continue  # one row is one adapter
            point = measure_point(
                session,
                batch,
                popularity,
                prompt_tokens=options.prompt_tokens,
                budget=budget_of(options),
                warmup=options.warmup,
                steps=options.steps,
                seed=options.seed + len(points),
            )
            points.append(point)
            print(f"{popularity} {batch}: {point['median_ms']:.3f} ms", file=sys.stderr, flush=True)
    return points


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write JSON and picture."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser().parse_args(words)
    report: dict[str, Any] = {"provenance": record.provenance(("bench", "decode", *words)), "points": []}
    try:
        check_systems(options.systems, options.adapters)
        run_systems(options, words, report)
    except PunicaError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    known = peers.figures_for(options.model, peers.DECODE_MS)
    report |= {"model": options.model, "lora_ranks": options.lora_ranks, "peers": known}
    record.write(options.out, report)
    plots.save(
        options.out.with_suffix(".png"),
        lambda axes: plots.decode(axes, report["points"], known),
        f"{options.model} on {report['device']}, prompts of {options.prompt_tokens} tokens, "
        f"{options.adapters} adapters of lora_rank {', '.join(map(str, options.lora_ranks))}",
    )
    print(table(report["points"], known))
    print(f"\nwritten to {options.out}")
    return 0


def run_systems(options: argparse.Namespace, words: Sequence[str], report: dict[str, Any]) -> None:
    """Fill the report's points, device and memory."""
    with_lora = [name for name in options.systems if name != OFF]
    if OFF in options.systems:
        if with_lora:
            report["points"] += measured_apart("decode", words, OFF)["points"]
        else:
            run_on_an_engine(options, [OFF], 0, report)
    if with_lora:
        run_on_an_engine(options, with_lora, options.adapters, report)


def run_on_an_engine(
    options: argparse.Namespace, systems: Sequence[str], num_adapters: int, report: dict[str, Any]
) -> None:
    with open_session(choice_of(options, num_adapters)) as session:
        report["points"] += measure(session, options, systems)
        report["device"] = device_name(session.layout.device)
        report["dtype"] = session.layout.dtype
        report["memory"] = session.memory()


if __name__ == "__main__":
    sys.exit(until_unread(main))
