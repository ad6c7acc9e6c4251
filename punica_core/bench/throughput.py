"""`punica bench throughput`: a whole workload through one engine in this process, adapters by popularity.

All requests are there at once. System off: an engine without LoRA, in a process of its own; base: LoRA on, nobody asks
for an adapter; identical, skewed, uniform, distinct: as in the Punica paper, over the whole workload. Weights and
adapters are random and made in memory; adapters are loaded before the clock starts.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from punica_core.bench import peers, peft_batch, plots, record
from punica_core.bench.answers import check_answers
from punica_core.bench.latency import percentiles
from punica_core.bench.parts import BASE, OFF, SYSTEMS, check_systems, device_name, measured_apart
from punica_core.bench.session import (
    Answer,
    EngineChoice,
    Session,
    add_engine_flags,
    int_list,
    name_list,
    open_session,
)
from punica_core.bench.workload import Workload, request_lengths
from punica_core.config import EngineConfig
from punica_core.errors import ConfigError, PunicaError
from punica_core.protocol import NewSequence
from punica_core.stdout import until_unread


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A workload by name. adapters 0: as many as there are requests, so that distinct ones are."""

    lengths: str
    requests: int
    adapters: int
    max_num_seqs: int
    seed: int


PRESETS: Final[Mapping[str, Preset]] = MappingProxyType(
    {
        "conversation": Preset(lengths="lognormal:90:1.2:150:1.0", requests=512, adapters=64, max_num_seqs=128, seed=0),
        "punica": Preset(lengths="punica:2048", requests=256, adapters=0, max_num_seqs=32, seed=0xABCDABCD987),
    }
)
"""conversation: 84,411 prompt and 95,531 generated tokens, the one that `peers` has figures for. punica: the text
generation of the Punica paper, a quarter of its 1024 requests."""


def measure_system(
    session: Session, system: str, workload: Workload, at_once: int | None = None
) -> tuple[dict[str, Any], list[Answer]]:
    """Run the workload for one system. Raises RuntimeError if an answer lacks a token."""
    tenant = f"{system} {workload.lengths} {workload.requests}"
    requests = make_requests(session, workload, tenant=tenant, with_adapters=system not in (OFF, BASE))
    row, answers = timed_run(session, requests, at_once)
    return {"system": system, **row}, answers


def make_requests(session: Session, workload: Workload, *, tenant: str, with_adapters: bool) -> list[NewSequence]:
    """The workload's requests. Those of different tenants share no KV, so that equal prompts cost the same again."""
    refs = {ref.name: ref for ref in session.adapters.refs} if with_adapters else {}
    return [
        session.request(planned.prompt_ids, planned.max_tokens, refs.get(planned.model), tenant=tenant)
        for planned in workload.plan()
    ]


def timed_run(
    session: Session, requests: Sequence[NewSequence], at_once: int | None = None
) -> tuple[dict[str, Any], list[Answer]]:
    """Run requests to their ends. Latencies count from the submission: of all at the start, or, of `at_once`, when one
    before had ended."""
    gc.collect()  # what was before is not this run's
    before, began = session.stats(), time.perf_counter()
    answers = session.run(requests, at_once)
    seconds = max(answer.times[-1] for answer in answers) - began
    after = session.stats()
    short = [answer for answer in answers if len(answer.token_ids) != answer.request.sampling.max_tokens]
    if short:
        raise RuntimeError(f"{len(short)} of {len(answers)} answers do not have the tokens that were asked for.")
    prompt = sum(len(request.prompt_ids) for request in requests)
    generated = sum(len(answer.token_ids) for answer in answers)
    steps = after.steps - before.steps
    row = {
        "requests": len(requests),
        "adapters": len({request.adapter for request in requests if request.adapter is not None}),
        "seconds": seconds,
        "prompt_tokens": prompt,
        "generated_tokens": generated,
        "generated_tokens_per_second": generated / seconds,
        "total_tokens_per_second": (prompt + generated) / seconds,
        "requests_per_second": len(requests) / seconds,
        "steps": steps,
        "mean_step_ms": seconds / steps * 1e3,
        "prefill_tokens": after.prefill_tokens - before.prefill_tokens,
        "decode_tokens": after.decode_tokens - before.decode_tokens,
        "preemptions": after.preemptions - before.preemptions,
        "ttft_ms": percentiles([answer.ttft for answer in answers]),
        "inter_token_ms": percentiles(np.concatenate([np.diff(answer.times) for answer in answers])),
        "latency_ms": percentiles([answer.times[-1] - answer.submitted for answer in answers]),
        "memory": session.memory(),
    }
    return row, answers


def measure_sweep(
    session: Session, adapters: Sequence[int], batches: Sequence[int], lengths: str, seed: int
) -> list[dict[str, Any]]:
    """Every number of adapters, in turn, with every batch: requests of equal lengths, so many in the engine at once."""
    names = tuple(ref.name for ref in session.adapters.refs)
    points = []
    for count in sorted(adapters):
        session.preload(session.adapters.refs[:count])
        for batch in batches:
            workload = Workload(
                models=names[:count],
                requests=max(4 * batch, count),
                popularity="distinct",
                lengths=lengths,
                seed=seed,
                token_range=(3, session.layout.vocab_size),
            )
            requests = make_requests(session, workload, tenant=f"sweep {count} {batch}", with_adapters=True)
            row, _ = timed_run(session, requests, at_once=batch)
            points.append({"batch": batch, **row})
            _say(f"{count} adapters, {batch} at once", row)
    return points


def table(rows: Mapping[str, Mapping[str, Any]], known: Mapping[str, Any]) -> str:
    """Markdown: a row for each system."""
    theirs = known.get("figures", {})
    reference = rows.get(OFF, rows.get(BASE))
    columns = [
        "tokens/s",
        f"of {OFF if OFF in rows else BASE}",
        "with prompts",
        "TTFT p50",
        "p99",
        "inter-token p50",
        "p99 ms",
    ]
    columns += [f"{known['system']}, tokens/s"] if theirs else []
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for name, row in rows.items():
        speed = row["generated_tokens_per_second"]
        share = f"{speed / reference['generated_tokens_per_second']:.1%}" if reference else ""
        cells = [f"{speed:.0f}", share, f"{row['total_tokens_per_second']:.0f}"]
        for kind in ("ttft_ms", "inter_token_ms"):
            cells += [f"{row[kind][p]:.1f}" if row[kind] else "" for p in ("p50", "p99")]
        cells += [f"{theirs[name]:.0f}" if name in theirs else ""] if theirs else []
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sweep_table(points: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: tokens/s, TTFT and inter-token p99 by number of adapters and batch."""
    lines = ["| adapters | batch | tokens/s | TTFT p50 | inter-token p50 | p99 ms | adapters MiB |"]
    lines.append("|---:|---:|---:|---:|---:|---:|---:|")
    for point in points:
        memory = point["memory"]
        held = (memory["adapter_gpu_bytes"] or memory["adapter_host_bytes"]) / 2**20
        gaps = point["inter_token_ms"]
        lines.append(
            f"| {point['adapters']} | {point['batch']} | {point['generated_tokens_per_second']:.0f} | "
            f"{point['ttft_ms']['p50']:.1f} | {gaps['p50']:.2f} | {gaps['p99']:.2f} | {held:.0f} |"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="punica bench throughput", description=__doc__)
    add_engine_flags(found)
    found.set_defaults(adapters=None, seed=None)
    found.add_argument("--workload", choices=tuple(PRESETS), default="conversation", help="defaults of the flags below")
    found.add_argument("--requests", type=int)
    found.add_argument("--lengths", help="see `punica bench serve`")
    found.add_argument("--max-num-seqs", type=int, help="most sequences that run at once")
    found.add_argument(
        "--target-step-ms",
        type=float,
        default=EngineConfig(model="").target_step_ms,
        help="of steps with streams; 0 is off",
    )
    found.add_argument("--systems", type=name_list, default=SYSTEMS, help=f"of {', '.join(SYSTEMS)}")
    found.add_argument("--sweep-adapters", type=int_list, default=(), help="such as 1,2,8,32,100,400")
    found.add_argument("--sweep-batches", type=int_list, default=(8, 32, 128))
    found.add_argument("--sweep-lengths", default="fixed:128:64")
    found.add_argument("--check", metavar="SYSTEM", default="", help="compare a tenth of its answers with solo ones")
    found.add_argument("--peft", type=int_list, default=(), help="compare batches of so many adapters with PEFT's")
    found.add_argument("--peft-new-tokens", type=int, default=32)
    found.add_argument("--out", type=Path, default=Path("benchmarks/throughput.json"))
    return found


def with_preset(options: argparse.Namespace) -> argparse.Namespace:
    """Fill what was not given from the preset, and the number of adapters from what uses them."""
    preset = PRESETS[options.workload]
    for key in ("requests", "lengths", "max_num_seqs", "seed"):
        if getattr(options, key) is None:
            setattr(options, key, getattr(preset, key))
    if options.adapters is None:
        options.adapters = preset.adapters or options.requests
    return options


def workload_of(options: argparse.Namespace, session: Session, system: str) -> Workload:
    names = tuple(ref.name for ref in session.adapters.refs)[: options.adapters]
    is_plain = system in (OFF, BASE)
    return Workload(
        models=(BASE,) if is_plain else names,
        requests=options.requests,
        popularity="identical" if is_plain else system,
        lengths=options.lengths,
        seed=options.seed,
        token_range=(3, session.layout.vocab_size),
    )


def choice_of(options: argparse.Namespace, *, lora: bool) -> EngineChoice:
    lengths = request_lengths(options.lengths, options.requests, options.seed)
    if lora:
        lengths = lengths + request_lengths(options.sweep_lengths, 1) * bool(options.sweep_adapters)
        lengths = lengths + [(128, options.peft_new_tokens)] * bool(options.peft)
    num_adapters = max((options.adapters, *options.sweep_adapters, *options.peft)) if lora else 0
    sweep_batches = options.sweep_batches if options.sweep_adapters else ()
    max_num_seqs = max((options.max_num_seqs, *sweep_batches, *options.peft))
    if options.systems and max_num_seqs > options.max_num_seqs:
        raise ConfigError(
            f"max_num_seqs is {options.max_num_seqs}, but a sweep or PEFT batch has {max_num_seqs}: one engine would "
            "run more of the workload at once than it should. Raise max_num_seqs, or sweep alone, with --systems ''.",
            param="max_num_seqs",
        )
    return EngineChoice(
        model=options.model,
        device=options.device,
        dtype=options.dtype,
        num_adapters=num_adapters,
        lora_ranks=options.lora_ranks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(options.max_num_batched_tokens, max_num_seqs),
        target_step_ms=options.target_step_ms,
        max_model_len=max(prompt + output for prompt, output in lengths),
        kv_tokens=options.kv_tokens,
        seed=0,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write JSON and pictures."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = with_preset(parser().parse_args(words))
    report: dict[str, Any] = {"provenance": record.provenance(("bench", "throughput", *words)), "systems": {}}
    try:
        check_systems(options.systems, options.adapters)
        measure(options, words, report)
    except PunicaError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    is_known = options.workload == "conversation" and (options.requests, options.lengths) == (
        PRESETS["conversation"].requests,
        PRESETS["conversation"].lengths,
    )
    known = peers.figures_for(options.model, peers.THROUGHPUT_TOKENS_PER_SECOND) if is_known else {}
    report |= {"settings": settings_of(options), "peers": known}
    record.write(options.out, report)
    draw(options, report, known)
    print("\n\n".join(tables(report, known)))
    print(f"\nwritten to {options.out}")
    return 0 if report.get("check", {"passed": True})["passed"] else 1


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What was measured, preset filled in."""
    return {key: value for key, value in vars(options).items() if isinstance(value, str | int | float | tuple)}


def measure(options: argparse.Namespace, words: Sequence[str], report: dict[str, Any]) -> None:
    """Fill the report: LoRA off and PEFT in processes of their own, then all the rest on one engine."""
    with_lora = [name for name in options.systems if name != OFF]
    is_alone = not with_lora and not options.sweep_adapters and not options.peft
    if OFF in options.systems and not is_alone:
        part = measured_apart("throughput", [*words, "--sweep-adapters", "", "--peft", "", "--check", ""], OFF)
        report["systems"][OFF] = part["systems"][OFF]
    choice = choice_of(options, lora=not is_alone)
    theirs = peft_batch.measure_peft(choice, options.peft, options.peft_new_tokens)
    with open_session(choice) as session:
        report |= {"device": device_name(session.layout.device), "dtype": session.layout.dtype}
        if options.sweep_adapters:
            report["sweep"] = measure_sweep(
                session, options.sweep_adapters, options.sweep_batches, options.sweep_lengths, options.seed
            )
        if theirs:
            report["peft"] = peft_batch.compare_with_peft(session, theirs)
        report["preload_seconds"] = session.preload(session.adapters.refs[: options.adapters])
        for system in [OFF] if is_alone else with_lora:
            row, answers = measure_system(session, system, workload_of(options, session, system))
            report["systems"][system] = row
            _say(system, row)
            if system == options.check:
                report["check"] = check_answers(session, answers).to_json()


def tables(report: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    found = [table(report["systems"], known)] if report["systems"] else []
    found += [sweep_table(report["sweep"])] if "sweep" in report else []
    found += [peft_batch.table(report["peft"])] if "peft" in report else []
    if "check" in report:
        check = report["check"]
        found.append(
            f"answers: {check['equal']} of {check['sampled']} equal to solo ones (control: {check['control_equal']}); "
            f"tokens at most {check['mixed']['largest']:.4f} nats behind (control {check['control']['largest']:.4f}, "
            f"band {check['band']:.4f}, another adapter {check['wrong']['largest']:.4f}): "
            + ("passed" if check["passed"] else "FAILED")
        )
    return found


def draw(options: argparse.Namespace, report: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    title = f"{options.model} on {report['device']}"
    if report["systems"]:
        plots.save(
            options.out.with_suffix(".png"),
            lambda axes: plots.throughput(axes, report["systems"], known),
            f"{title}: {options.requests} requests, {options.lengths}, at most {options.max_num_seqs} running",
        )
    if "sweep" in report:
        plots.save(
            options.out.with_name(f"{options.out.stem}-adapters.png"),
            lambda axes: plots.sweep(axes, report["sweep"]),
            f"{title}: {options.sweep_lengths}",
        )


def _say(what: str, row: Mapping[str, Any]) -> None:
    print(f"{what}: {row['generated_tokens_per_second']:.0f} generated tokens/s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(until_unread(main))
