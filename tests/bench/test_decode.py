"""`punica bench decode`: every point is timed over whole steps, and the report says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from punica_core.bench import decode, peers
from punica_core.bench.device_time import device_share
from punica_core.bench.parts import check_systems
from punica_core.bench.session import Session
from punica_core.errors import ConfigError

FLAGS = ["--model", "tiny", "--device", "cpu", "--adapters", "3", "--lora-ranks", "4", "--prompt-tokens", "20"]


def test_a_point_counts_only_steps_that_give_every_sequence_a_token(session: Session) -> None:
    point = decode.measure_point(session, 4, "distinct", prompt_tokens=20, budget=32, warmup=2, steps=12, seed=0)
    assert (point["batch"], point["adapters"], point["steps"]) == (4, 4, 12)
    assert 0 < point["p10_ms"] <= point["median_ms"] <= point["p90_ms"] <= point["max_ms"]
    assert point["device"] is None
    assert (session.stats().running, session.stats().waiting) == (0, 0)


def test_a_step_without_all_tokens_is_refused(session: Session) -> None:
    requests = [session.request([5, 6, 7], 20), session.request([5, 6, 8], 3)]
    session.submit(requests)
    decode.prefill(session, 2)
    for _ in range(2):
        decode.decode_step(session, 2)
    with pytest.raises(RuntimeError, match="2 sequences gave 1 tokens"):
        decode.decode_step(session, 2)
    session.cancel(requests)


def test_adapters_wrap_around_and_base_has_none(session: Session) -> None:
    refs = session.adapters.refs
    assert decode.adapters_of(session, "base", 3) == [None] * 3
    assert set(decode.adapters_of(session, "identical", 3)) == {refs[0]}
    assert set(decode.adapters_of(session, "distinct", 3)) == set(refs[:3])
    assert set(decode.adapters_of(session, "distinct", 12)) == set(refs)


@pytest.mark.parametrize(("batch", "prompt", "budget"), [(6, 20, 32), (6, 20, 12), (1, 64, 8)])
def test_the_first_sequence_outlives_the_prompts_of_the_last(batch: int, prompt: int, budget: int) -> None:
    left, decoding, steps = [prompt] * batch, 0, 0
    while left:
        steps += 1
        room = budget - decoding
        while room and left:
            taken = min(room, left[0])
            left[0] -= taken
            room -= taken
            if not left[0]:
                left.pop(0)
                decoding += 1
    assert decode.new_tokens_of(batch, prompt, budget, 10) >= steps + 10


def test_the_command_writes_points_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "decode.json"
    flags = [*FLAGS, "--batches", "1,3", "--steps", "5", "--warmup", "1", "--out", str(out)]
    assert decode.main(flags) == 0
    report = json.loads(out.read_text())
    found = {(point["popularity"], point["batch"]): point["adapters"] for point in report["points"]}
    assert found == {
        ("off", 1): 0,
        ("off", 3): 0,
        ("base", 1): 0,
        ("base", 3): 0,
        ("identical", 1): 1,
        ("identical", 3): 1,
        ("distinct", 3): 3,
    }
    assert (report["device"], report["dtype"], report["peers"]) == ("cpu", "float32", {})
    assert report["provenance"]["command"].startswith("punica bench decode --model tiny")
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "| batch | off | base | identical | distinct |" in capsys.readouterr().out


def test_an_unknown_system_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main([*FLAGS, "--systems", "fair"]) == 1
    assert "systems has 'fair'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="adapters is 0"):
        check_systems(["base"], 0)
    check_systems(["off"], 0)


def test_the_table_says_what_lora_adds_and_what_others_reach() -> None:
    points = [{"popularity": name, "batch": 8, "median_ms": ms} for name, ms in (("off", 5.0), ("identical", 5.5))]
    text = decode.table(points, peers.figures_for("llama-3.1-8b", peers.DECODE_MS))
    assert "| 8 | 5.000 | 5.500 (+10.0%) |" in text
    assert "vLLM 0.26.0 on one H200, identical: 8: 7.78" in text
    assert peers.figures_for("llama-2-7b", peers.DECODE_MS) == {}


def test_device_time_counts_overlapping_kernels_once() -> None:
    events = [
        {"cat": "kernel", "ts": 0.0, "dur": 100.0},
        {"cat": "kernel", "ts": 50.0, "dur": 100.0},
        {"cat": "gpu_memcpy", "ts": 60.0, "dur": 10.0},
        {"cat": "kernel", "ts": 200.0, "dur": 50.0},
        {"cat": "cpu_op", "ts": 0.0, "dur": 9999.0},
        {"cat": "gpu_user_annotation", "ts": 0.0, "dur": 9999.0},
        {"name": "no category"},
    ]
    assert device_share(events, 2) == {"busy_ms": 0.1, "idle_share": pytest.approx(0.2), "kernels": 2.0}
    assert device_share([], 2)["idle_share"] == 1.0
