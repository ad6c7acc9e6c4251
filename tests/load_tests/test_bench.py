"""`punica bench`: the contender does the work it is timed for, and the figures are made of what was measured."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.bench import cpu, frontend
from app.bench.cpu import Figures, Measurement, aims, cases, measure_all, table
from app.bench.process import Tree, cpu_seconds, resident_bytes
from punica_core.bench.peft_generate import Contender, Job
from punica_core.errors import ConfigError
from tests.support.peft_adapters import peft_warnings_ignored, save_peft_adapter, tiny_llama
from tests.support.tokenizer_folders import BYTE_LEVEL_VOCAB, byte_level_tokenizer, write_folder

PROMPTS = [[5, 9, 200, 31], [7, 7, 8, 9], [300, 2, 3, 4]]


@pytest.fixture(scope="module")
def contender(tmp_path_factory: pytest.TempPathFactory) -> Contender:
    folder = tmp_path_factory.mktemp("contender")
    tiny_llama().save_pretrained(folder / "base")
    save_peft_adapter(folder / "adapters" / "a", seed=1)
    save_peft_adapter(folder / "adapters" / "b", seed=2)
    with peft_warnings_ignored():
        return Contender(folder / "base", folder / "adapters")


def generated(contender: Contender, way: str, adapters: list[str]) -> list[list[int]]:
    job = Job(way=way, prompts=PROMPTS, adapters=adapters, new_tokens=6)  # type: ignore[arg-type]
    with peft_warnings_ignored():
        return contender.generate(job)


def test_the_contender_uses_the_adapters_it_is_asked_for(contender: Contender) -> None:
    switching = generated(contender, "switching", ["a", "", "b"])
    assert switching == generated(contender, "mixed", ["a", "", "b"])
    base = generated(contender, "single", ["a", "", "b"])
    assert [ours == theirs for ours, theirs in zip(switching, base, strict=True)] == [False, True, False]
    assert generated(contender, "switching", ["b", "", "a"]) != switching


def test_the_contender_generates_every_token_it_is_timed_for(contender: Contender) -> None:
    with peft_warnings_ignored():
        timing = contender.run(Job(way="mixed", prompts=PROMPTS, adapters=["a", "a", ""], new_tokens=6))
    assert timing.generated_tokens == 18
    assert timing.seconds > 0


def figures_of(speed: Callable[[str], float]) -> dict[str, Figures]:
    todo = cases([8], ["a", "b", "c", "d"], switched=4)
    return {case.label: Figures([Measurement(100, 100 / speed(case.label), 100 / speed(case.label))]) for case in todo}


def test_ratios_say_who_is_faster_and_what_adapters_cost() -> None:
    def speed(label: str) -> float:
        if label.startswith("ours"):
            return 100.0 if "base, 8" in label else 80.0
        return 20.0

    found = aims(figures_of(speed), [8])
    assert found["1 stream / transformers"] == pytest.approx({"wall": 4.0, "cpu": 4.0})
    assert found["8 streams / PEFT one at a time"] == pytest.approx({"wall": 4.0, "cpu": 4.0})
    assert found["cost of 4 adapters, 8 streams"] == pytest.approx({"wall": 0.25, "cpu": 0.25})


class Timed:
    """Either side, with nothing behind it: notes the requests of each job."""

    adapters = ("a", "b", "c", "d")

    def __init__(self) -> None:
        self.jobs: list[int] = []

    def measure(self, *job: Any) -> Measurement:
        plan = job[-1]
        self.jobs.append(len(plan))
        return Measurement(sum(request.max_tokens for request in plan), 1.0, 1.0)


def options(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cpu.add_flags(parser)
    return parser.parse_args(["--repeats", "2", *flags])


def test_one_case_and_its_contender_can_be_timed_alone() -> None:
    ours, contender = Timed(), Timed()
    chosen = options("--only", "1 stream")
    figures = measure_all(chosen, ours, contender)  # type: ignore[arg-type]
    assert set(figures) == {"ours, base, 1 stream", "transformers, base, 1 stream"}
    assert ours.jobs == contender.jobs == [1, 1, 1]  # one to warm up, two repeats
    assert set(aims(figures, chosen.streams)) == {"1 stream / transformers"}


def test_all_cases_are_timed_unless_some_are_named() -> None:
    chosen = options()
    figures = measure_all(chosen, Timed(), Timed())  # type: ignore[arg-type]
    assert len(figures) == len(cases(chosen.streams, Timed.adapters, 4)) > 2
    assert len(aims(figures, chosen.streams)) == 7


def test_a_name_that_no_case_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="'9 streams'"):
        measure_all(options("--only", "9 streams"), Timed(), Timed())  # type: ignore[arg-type]


def test_a_figure_is_the_median_of_its_runs() -> None:
    figures = Figures([Measurement(10, 1.0, 0.5), Measurement(10, 100.0, 50.0), Measurement(10, 2.0, 1.0)])
    assert figures.tokens_per_second == 5.0
    assert figures.cpu_ms_per_token == 100.0


def test_the_tables_have_a_row_for_every_case_and_ratio() -> None:
    figures = figures_of(lambda label: 50.0)
    ratios = aims(figures, [8])
    text = table(figures, ratios)
    assert text.count("\n") + 1 == len(figures) + len(ratios) + 5
    assert "| cost of 4 adapters, 8 streams | +0% | +0% |" in text


def test_processes_are_measured() -> None:
    before = cpu_seconds(os.getpid())
    sum(range(3_000_000))
    assert cpu_seconds(os.getpid()) > before
    assert resident_bytes(os.getpid()) > 1 << 20
    assert Tree(os.getpid()).pids()[0] == os.getpid()


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    folder = write_folder(tmp_path / "model", byte_level_tokenizer())
    (folder / "config.json").write_text(json.dumps({"vocab_size": 30_000 + BYTE_LEVEL_VOCAB}))
    return folder


def test_the_front_end_benchmark_counts_every_token(tokenizer_folder: Path, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    frontend.add_flags(parser)
    out = tmp_path / "frontend.json"
    flags = ["--model", str(tokenizer_folder), "--streams", "5", "--tokens", "30", "--rate", "3000"]
    assert frontend.main(parser.parse_args([*flags, "--round-trips", "3", "--out", str(out)])) == 0
    report = json.loads(out.read_text())
    (throughput,) = report["throughput"]
    assert (throughput["streams"], throughput["tokens"]) == (5, 150)
    assert throughput["tokens_per_event"] > 0
    assert report["latency"]["round_trip_ms"]["p50"] > 0
    assert report["provenance"]["cores"] >= 1


def test_the_comparison_needs_adapters(tokenizer_folder: Path) -> None:
    parser = argparse.ArgumentParser()
    cpu.add_flags(parser)
    with pytest.raises(cpu.ConfigError, match="--adapters"):
        cpu.main(parser.parse_args(["--model", str(tokenizer_folder)]))
