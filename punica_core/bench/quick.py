"""`punica bench quick`: PEFT, decode steps, the workload and a check of its answers, on one engine.

For a GPU that is at hand for minutes: the model is loaded, compiled and captured once, the report is written after
every figure, and a part that fails is named while the others go on. `punica bench decode` and `throughput` measure the
same, each on engines of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from punica_core.bench import decode, peft_batch, record, throughput
from punica_core.bench.answers import check_answers
from punica_core.bench.parts import BASE, OFF, SYSTEMS, check_systems, device_name
from punica_core.bench.session import Answer, Session, int_list, name_list, open_session
from punica_core.bench.workload import request_lengths
from punica_core.errors import PunicaError
from punica_core.stdout import until_unread

PREFILL_SHARE: Final = 8
"""Steps are paced, so that prompts may take so many times the steps that full chunks would: sequences live as long."""


MORE_SYSTEMS: Final = tuple(name for name in SYSTEMS if name != OFF)
"""What an engine with LoRA can measure."""


@dataclasses.dataclass(frozen=True, slots=True)
class More:
    """A further workload: a preset of `punica bench throughput`, so many requests, of which so many run at once.
    systems: for whom; empty for those of the main workload."""

    workload: str
    at_once: int
    requests: int
    systems: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> More:
        workload, at_once, requests, *systems = text.split(":")
        if workload not in throughput.PRESETS:
            raise ValueError(f"{workload!r} is none of {', '.join(throughput.PRESETS)}")
        names = tuple(systems[0].split("+")) if len(systems) == 1 else ()
        if len(systems) > 1 or not set(names) <= set(MORE_SYSTEMS):
            raise ValueError(f"the systems of {text!r} must be of {'+'.join(MORE_SYSTEMS)}")
        return cls(workload, int(at_once), int(requests), names)

    def options(self, options: argparse.Namespace) -> argparse.Namespace:
        """As if this were the workload that was asked for."""
        preset = throughput.PRESETS[self.workload]
        own = {"requests": self.requests, "lengths": preset.lengths, "seed": preset.seed}
        return argparse.Namespace(**vars(options) | own)


def more_list(text: str) -> tuple[More, ...]:
    return tuple(map(More.parse, name_list(text)))


class Parts:
    """The report, written after each part, and what has failed of it."""

    def __init__(self, out: Path, words: Sequence[str]) -> None:
        self.report: dict[str, Any] = {"provenance": record.provenance(("bench", "quick", *words)), "failed": {}}
        self._out = out
        self._began = time.monotonic()

    def run(self, name: str, measure: Callable[[], Any]) -> Any:
        """Measure, keep and write; None if it raises, which is kept too."""
        try:
            found = measure()
        except (PunicaError, RuntimeError, ValueError, OSError) as error:
            found = None
            self.report["failed"][name] = f"{type(error).__name__}: {error}"
        if found is not None:
            self.report[name] = found
        record.write(self._out, self.report)
        say = self.report["failed"].get(name, "done")
        print(f"{time.monotonic() - self._began:6.1f} s  {name}: {say}", file=sys.stderr, flush=True)
        return found


def parser() -> argparse.ArgumentParser:
    found = throughput.parser()
    found.prog, found.description = "punica bench quick", __doc__
    found.set_defaults(
        out=Path("benchmarks/quick.json"), peft=(8, 32), systems=(BASE, "identical", "skewed", "uniform", "distinct")
    )
    found.add_argument("--batches", type=int_list, default=(1, 8, 32, 64, 128), help="of decode steps")
    found.add_argument("--decode-systems", type=name_list, default=(BASE, "identical", "distinct"))
    found.add_argument("--prompt-tokens", type=int, default=128)
    found.add_argument("--warmup", type=int, default=16)
    found.add_argument("--steps", type=int, default=64)
    found.add_argument(
        "--more",
        type=more_list,
        default=(),
        help="workloads behind it: preset:at once:requests[:systems]: punica:32:64:base+skewed",
    )
    found.add_argument("--check-every", type=int, default=40, help="every so many-th answer of the last system")
    return found


def measure(options: argparse.Namespace, parts: Parts) -> None:
    """All parts, in the order of the report."""
    choice = throughput.choice_of(options, lora=True)
    lengths = [_tokens_of(options, batch) for batch in options.batches]
    for more in options.more:
        own = more.options(options)
        lengths += map(sum, request_lengths(own.lengths, own.requests, own.seed))
    choice = dataclasses.replace(
        choice,
        max_model_len=max(choice.max_model_len, *lengths),
        max_num_seqs=max((choice.max_num_seqs, *(more.at_once for more in options.more))),
    )
    theirs = parts.run("peft", lambda: peft_batch.measure_peft(choice, options.peft, options.peft_new_tokens))
    with open_session(choice) as session:
        parts.report |= {"device": device_name(session.layout.device), "dtype": session.layout.dtype}
        session.preload(session.adapters.refs)
        points = [(batch, system) for batch in options.batches for system in options.decode_systems]
        for seed, (batch, system) in enumerate(points):
            if batch > 1 or system in (BASE, "identical"):  # one row is one adapter
                parts.run(f"decode {system} {batch}", partial(_decode, session, options, batch, system, seed))
        if theirs:
            parts.run("peft", partial(peft_batch.compare_with_peft, session, theirs))
        answers: list[Answer] = []
        for system in options.systems:
            parts.run(f"throughput {system}", partial(_workload, session, options, system, answers))
        if answers:
            parts.run("check", lambda: check_answers(session, answers, options.check_every).to_json())
        for more in options.more:
            for system in more.systems or options.systems:
                name = f"{more.workload}, {more.at_once} at once, {system}"
                parts.run(name, partial(_more, session, more.options(options), system, more.at_once))
        parts.run("memory", session.memory)


def _budget(options: argparse.Namespace, batch: int) -> int:
    return batch + max(int(options.max_num_batched_tokens) // PREFILL_SHARE, 1)


def _tokens_of(options: argparse.Namespace, batch: int) -> int:
    """Of a sequence of a decode point, at most."""
    steps = options.warmup + options.steps + decode.PROFILED_STEPS
    prompt_tokens = int(options.prompt_tokens)
    return prompt_tokens + decode.new_tokens_of(batch, prompt_tokens, _budget(options, batch), steps)


def _decode(session: Session, options: argparse.Namespace, batch: int, system: str, seed: int) -> dict[str, Any]:
    point = decode.measure_point(
        session,
        batch,
        system,
        prompt_tokens=options.prompt_tokens,
        budget=_budget(options, batch),
        warmup=options.warmup,
        steps=options.steps,
        seed=seed,
    )
    _say(f"{point['median_ms']:.3f} ms")
    return point


def _workload(session: Session, options: argparse.Namespace, system: str, answers: list[Answer]) -> dict[str, Any]:
    """One system's row; `answers` becomes its answers. All requests are there from the start, unless the engine would
    run more of them at once than were asked for."""
    at_once = options.max_num_seqs if any(more.at_once > options.max_num_seqs for more in options.more) else None
    workload = throughput.workload_of(options, session, system)
    row, answers[:] = throughput.measure_system(session, system, workload, at_once)
    _say(f"{row['generated_tokens_per_second']:.0f} generated tokens/s")
    return row


def _more(session: Session, options: argparse.Namespace, system: str, at_once: int) -> dict[str, Any]:
    row, _ = throughput.measure_system(session, system, throughput.workload_of(options, session, system), at_once)
    _say(f"{row['generated_tokens_per_second']:.0f} generated tokens/s")
    return row


def _say(figure: str) -> None:
    print(f"{'':10}{figure}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 all parts were measured and the answers passed, 1 not."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = throughput.with_preset(parser().parse_args(words))
    parts = Parts(options.out, words)
    try:
        check_systems(options.systems, options.adapters)
        measure(options, parts)
    except PunicaError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    print(f"written to {options.out}")
    return int(bool(parts.report["failed"]) or not parts.report.get("check", {"passed": True})["passed"])


if __name__ == "__main__":
    sys.exit(until_unread(main))
