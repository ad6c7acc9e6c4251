"""The benchmark of decode attention, as far as it runs without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from punica_core import ops
from punica_core.bench import attention
from punica_core.bench.attention import Attend, Case, Sizes, describe, measure_case


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(attention, "_ROTATED_BYTES", 1 << 20)
    sizes = Sizes(3, 20)
    torch.manual_seed(0)
    return Case(sizes, torch.randn(sizes.elements + 5, dtype=torch.bfloat16))


def attending(case: Case, factor: float = 1.0) -> Attend:
    def attend(layer: int) -> torch.Tensor:
        out, batch = torch.empty_like(case.query), case.attention_batch
        tables = (case.lane.kv_indptr, batch.kv_indices, case.lane.last_block_len)
        ops.decode_attention(out, case.query, case.cache, *tables, layer, attention._SPEC.scaling)
        return factor * out

    return attend


def failing(case: Case) -> Attend:
    raise RuntimeError("no such kernel\nand more")


def test_a_case_outgrows_the_cache_and_its_last_token_is_the_appended_one(case: Case) -> None:
    assert case.sizes.layers * case.sizes.kv_bytes >= 1 << 20
    before = case.cache.clone()
    case.append(case.sizes.layers + 1)
    changed = (case.cache != before).flatten(4).any(-1).nonzero().tolist()
    last = case.attention_batch.kv_indices[1::2].tolist()
    assert changed == sorted([block, 1, half, 3] for block in last for half in (0, 1))


def test_a_variant_that_fails_or_errs_is_seen_and_the_others_are_timed(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(call: Callable[[int], None], calls: int) -> float:
        for index in range(calls):
            call(index)
        return 7.0 if call == case.append else 9.5

    monkeypatch.setattr(attention, "time_graph_us", timed)
    variants = {"right": attending, "wrong": lambda case: attending(case, 1.5), "broken": failing}
    monkeypatch.setattr(attention, "VARIANTS", variants)
    row = measure_case(case, list(variants))
    assert row["right"] == {"us": 2.5, "tb_s": round(3 * 20 * 4096 / 2.5e6, 2), "error": pytest.approx(0, abs=5e-3)}
    assert row["wrong"]["error"] == pytest.approx(0.5, abs=0.01)
    assert row["broken"] == {"failed": "RuntimeError: no such kernel"}
    assert describe(row, list(variants)).split() == ["3", "20", "2.5", "(0.10)", "2.5", "(0.10)", "failed"]


def test_unknown_variants_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        attention.main(["--variants", "own,fastest"])
    assert "unknown variants fastest" in capsys.readouterr().err
