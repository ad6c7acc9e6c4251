"""`punica bench throughput`: the workload is the one that is named, every token is counted, and nothing is shared."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from punica_core.bench import peft_batch, throughput
from punica_core.bench.peft_batch import PeftBatch
from punica_core.bench.peft_generate import generate_greedy
from punica_core.bench.session import EngineChoice, Session, engine_config
from punica_core.bench.shapes import model_folder
from punica_core.bench.synthetic import SyntheticAdapters
from punica_core.bench.workload import Workload, assign_models, request_lengths
from punica_core.config import EngineConfig

FLAGS = [
    *("--model", "tiny", "--device", "cpu", "--adapters", "4", "--lora-ranks", "4", "--requests", "9"),
    *("--lengths", "uniform:5:12:3:7", "--max-num-seqs", "4", "--max-num-batched-tokens", "32"),
]


def workload(session: Session, **changes: object) -> Workload:
    names = tuple(ref.name for ref in session.adapters.refs)
    choice = {"models": names, "requests": 7, "popularity": "distinct", "lengths": "uniform:5:12:3:7"} | changes
    return Workload(**choice, token_range=(3, session.layout.vocab_size))  # type: ignore[arg-type]


@pytest.mark.parametrize("flags", [[], ["--target-step-ms", "0"]])
def test_steps_are_paced_as_by_a_server_unless_asked_not_to_be(flags: list[str], tmp_path: Path) -> None:
    options = throughput.with_preset(throughput.parser().parse_args([*FLAGS, *flags]))
    target_ms = 0.0 if flags else EngineConfig(model="m").target_step_ms
    choice = throughput.choice_of(options, lora=True)
    assert choice.target_step_ms == target_ms == throughput.settings_of(options)["target_step_ms"]
    config = engine_config(choice, model_folder("tiny", tmp_path), SyntheticAdapters(0, (4,), seed=0))
    assert config.target_step_ms == target_ms
    assert EngineChoice(model="tiny").target_step_ms == 0, "where prompts are not what is measured"


def test_a_system_generates_the_whole_workload(session: Session) -> None:
    lengths = request_lengths("uniform:5:12:3:7", 7)
    row, answers = throughput.measure_system(session, "distinct", workload(session))
    assert (row["prompt_tokens"], row["generated_tokens"]) == tuple(map(sum, zip(*lengths, strict=True)))
    assert (row["requests"], row["adapters"]) == (7, 5)
    assert row["prefill_tokens"] == row["prompt_tokens"]
    assert row["decode_tokens"] == row["generated_tokens"] - 7
    assert row["generated_tokens_per_second"] * row["seconds"] == pytest.approx(row["generated_tokens"])
    assert row["total_tokens_per_second"] > row["generated_tokens_per_second"]
    assert row["ttft_ms"]["max"] <= row["latency_ms"]["max"] <= row["seconds"] * 1e3
    assert len(answers) == 7


def test_systems_do_not_share_the_prompts_of_one_another(session: Session) -> None:
    once, _ = throughput.measure_system(session, "base", workload(session, lengths="fixed:40:3"))
    again, _ = throughput.measure_system(session, "off", workload(session, lengths="fixed:40:3"))
    assert once["prefill_tokens"] == again["prefill_tokens"] == 7 * 40
    same, _ = throughput.measure_system(session, "off", workload(session, lengths="fixed:40:3"))
    assert same["prefill_tokens"] < 7 * 40


def test_base_asks_for_no_adapter(session: Session) -> None:
    asked = throughput.make_requests(session, workload(session), tenant="t", with_adapters=False)
    assert {request.adapter for request in asked} == {None}
    asked = throughput.make_requests(session, workload(session), tenant="t", with_adapters=True)
    assert {request.adapter for request in asked} == set(session.adapters.refs)


@pytest.mark.parametrize(
    ("popularity", "adapters"), [("identical", 1), ("skewed", 14), ("uniform", 23), ("distinct", 64)]
)
def test_the_conversation_has_the_published_number_of_adapters(popularity: str, adapters: int) -> None:
    names = [f"a{index}" for index in range(64)]
    assert len(set(assign_models(popularity, names, 512))) == adapters
    preset = throughput.PRESETS["conversation"]
    lengths = request_lengths(preset.lengths, preset.requests, preset.seed)
    assert tuple(map(sum, zip(*lengths, strict=True))) == (84_411, 95_531)


def test_punica_has_an_adapter_for_every_request_if_they_are_distinct() -> None:
    options = throughput.with_preset(throughput.parser().parse_args(["--workload", "punica"]))
    assert (options.adapters, options.requests, options.max_num_seqs) == (256, 256, 32)
    assert throughput.choice_of(options, lora=True).num_adapters == 256
    assert throughput.choice_of(options, lora=False).num_adapters == 0


def test_the_command_measures_checks_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "throughput.json"
    more = ["--sweep-adapters", "1,3", "--sweep-batches", "2", "--sweep-lengths", "fixed:6:3", "--check", "skewed"]
    systems = ["--systems", "base,skewed", "--out", str(out)]
    assert throughput.main([*FLAGS, *systems, *more]) == 0
    report = json.loads(out.read_text())
    assert list(report["systems"]) == ["base", "skewed"]
    assert [(point["adapters"], point["batch"]) for point in report["sweep"]] == [(1, 2), (3, 2)]
    assert report["sweep"][0]["memory"]["adapter_host_bytes"] < report["sweep"][1]["memory"]["adapter_host_bytes"]
    assert report["check"]["passed"]
    assert report["settings"]["lengths"] == "uniform:5:12:3:7"
    assert out.with_suffix(".png").exists()
    assert (tmp_path / "throughput-adapters.png").exists()
    printed = capsys.readouterr().out
    assert "| skewed |" in printed
    assert "passed" in printed


def test_one_engine_does_not_run_more_than_the_workload_allows(capsys: pytest.CaptureFixture[str]) -> None:
    assert throughput.main([*FLAGS, "--systems", "base", "--sweep-adapters", "1", "--sweep-batches", "8"]) == 1
    assert "max_num_seqs is 4" in capsys.readouterr().err


def test_peft_uses_the_adapters_it_is_timed_with(tmp_path: Path) -> None:
    folder = model_folder("tiny", tmp_path)
    contender = PeftBatch(folder, 2, (4,), EngineChoice(model="tiny", device="cpu"))
    prompts = [[5, 9, 200, 31]] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = [*contender.names, "__base__"]
        first, second, base = generate_greedy(contender.model, prompts, 12, adapter_names=names)
        found = contender.measure(2, 3, 512)
    assert first != second != base != first
    assert found["peft_batch_tokens_per_second"] > 0
    assert found["peft_one_at_a_time_tokens_per_second"] > 0


def test_the_comparison_is_of_as_many_tokens(session: Session) -> None:
    theirs = {"batch": 3, "prompt_tokens": 10, "new_tokens": 4, "peft_batch_tokens_per_second": 1.0}
    theirs |= {"peft_one_at_a_time_tokens_per_second": 0.5}
    before = session.stats()
    (row,) = peft_batch.compare_with_peft(session, [theirs])
    assert row["times_peft_batch"] == row["generated_tokens_per_second"] > 0
    assert session.stats().decode_tokens - before.decode_tokens >= 3 * 3
    assert f"| 3 | {row['generated_tokens_per_second']:.1f} | 1.0 | 0.5 |" in peft_batch.table([row])
