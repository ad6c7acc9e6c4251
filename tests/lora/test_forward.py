"""`forward` of a mixed batch equals PEFT's, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from punica_core import BatchLoRA, LoRALinear, LoRAWeight, ops
from punica_core.lora import batch_step
from tests.lora.conftest import LORA_INDICES
from tests.support.peft_adapters import edit_tensors, save_peft_adapter, tiny_llama
from tests.support.peft_batch import left_padded, prompts, row_logits
from tests.support.tiny_models import TINY_MODELS, VOCAB_SIZE

TOLERANCE = 2e-5


def assert_rows_equal(got: torch.Tensor, want: list[torch.Tensor]) -> None:
    for index, (row, expected) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(
            row, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, i=index: f"row {i}: {m}"
        )


def test_each_row_has_the_logits_of_its_adapter(folders: list[Path]) -> None:
    rows = prompts([9] * 6)
    want = row_logits(folders, LORA_INDICES, rows)
    with BatchLoRA(tiny_llama(), folders) as m:
        got = m(torch.stack(rows), lora_indices=LORA_INDICES).logits
        assert_rows_equal(got, want)
        shifted = m(torch.stack(rows), lora_indices=LORA_INDICES[1:] + LORA_INDICES[:1]).logits
    for row, expected in zip(shifted, want, strict=True):
        assert (row - expected).abs().max() > 100 * TOLERANCE, "the wrong adapter must show"


def test_the_ops_give_what_the_products_of_a_cpu_give(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.stack(prompts([9] * 6))
    calls = []
    apply = ops.lora_apply
    monkeypatch.setattr(
        ops, "lora_apply", lambda *arguments, **options: (calls.append(1), apply(*arguments, **options))
    )
    with BatchLoRA(tiny_llama(), folders) as m:
        direct = m(ids, lora_indices=LORA_INDICES).logits
        assert not calls
        monkeypatch.setattr(batch_step, "_is_direct", lambda y: False)
        by_ops = m(ids, lora_indices=LORA_INDICES).logits
    assert calls
    torch.testing.assert_close(direct, by_ops, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_rows_at_hand_say_who_sums(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    apply = ops.lora_apply

    def noting(y: torch.Tensor, *arguments: Any, summed: bool) -> None:
        told.append((len(y), summed))
        apply(y, *arguments, summed=summed)

    monkeypatch.setattr(ops, "lora_apply", noting)
    monkeypatch.setattr(batch_step, "_is_direct", lambda y: False)
    wide = LoRAWeight(torch.randn(64, 64), torch.randn(64, 64))
    narrow = LoRAWeight(torch.randn(8, 64), torch.randn(64, 8))
    layer = LoRALinear.from_linear(torch.nn.Linear(64, 64))
    with BatchLoRA(layer, [narrow, wide]) as m:
        for batch, slot, summed in ((17, 1, True), (17, 0, False), (16, 1, False), (257, 0, True)):
            told.clear()
            m(torch.randn(batch, 64), lora_indices=[slot] * batch)
            assert told == [(batch, summed)]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor], ids=["list", "tuple", "numpy", "torch"])
def test_lora_indices_may_be_any_sequence_of_integers(folders: list[Path], kind: type) -> None:
    ids = torch.stack(prompts([5] * 6))
    with BatchLoRA(tiny_llama(), folders) as m:
        want = m(ids, lora_indices=LORA_INDICES).logits
        assert torch.equal(m(input_ids=ids, lora_indices=kind(LORA_INDICES)).logits, want)


def test_right_padding_changes_no_real_token(folders: list[Path]) -> None:
    rows = prompts([4, 9, 7, 2, 9, 5])
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    with BatchLoRA(tiny_llama(), folders) as m:
        got = m(ids, attention_mask=mask, lora_indices=LORA_INDICES).logits
    assert_rows_equal(
        [row[: len(r)] for row, r in zip(got, rows, strict=True)], row_logits(folders, LORA_INDICES, rows)
    )


def test_left_padding_changes_no_real_token(folders: list[Path]) -> None:
    rows = prompts([4, 9, 7, 2, 9, 5])
    ids, mask = left_padded(rows)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with BatchLoRA(tiny_llama(), folders) as m:
        got = m(ids, attention_mask=mask, position_ids=positions, lora_indices=LORA_INDICES).logits
    got = [row[-len(r) :] for row, r in zip(got, rows, strict=True)]
    assert_rows_equal(got, row_logits(folders, LORA_INDICES, rows))


@pytest.mark.filterwarnings(
    "ignore:`past_key_values` is deprecated:FutureWarning"
)  # its new name is not in all versions
def test_a_prompt_in_pieces_with_past_key_values_equals_the_whole(folders: list[Path]) -> None:
    rows = prompts([11] * 6)
    ids = torch.stack(rows)
    pieces, cache = [], None
    with BatchLoRA(tiny_llama(), folders) as m:
        for piece in ids.split([6, 1, 1, 3], dim=1):
            output = m(piece, past_key_values=cache, use_cache=True, lora_indices=LORA_INDICES)
            cache = output.past_key_values
            pieces.append(output.logits)
    assert_rows_equal(torch.cat(pieces, 1), row_logits(folders, LORA_INDICES, rows))


def test_the_head_may_see_fewer_tokens_than_the_layers_do(tmp_path: Path) -> None:
    head = save_peft_adapter(tmp_path / "head", target_modules=["lm_head", "q_proj"], seed=5)
    # PEFT adds the untrained base matrix of the head, which is refused.
    edit_tensors(head, lambda tensors: {name: t for name, t in tensors.items() if "base_layer" not in name})
    rows = prompts([8] * 3)
    with BatchLoRA(tiny_llama(), [head]) as m:
        got = m(torch.stack(rows), logits_to_keep=2, lora_indices=[0, -1, 0]).logits
    assert_rows_equal(got, [row[-2:] for row in row_logits([head], [0, -1, 0], rows)])


@pytest.mark.parametrize("name", TINY_MODELS)
def test_other_architectures(tmp_path: Path, name: str) -> None:
    base = TINY_MODELS[name]
    folders = [save_peft_adapter(tmp_path / str(r), base(), seed=r, r=r) for r in (4, 9)]
    rows = prompts([12] * 3, vocab_size=VOCAB_SIZE)
    want = row_logits(folders, [1, -1, 0], rows, base)
    with BatchLoRA(base(), folders) as m:
        got = m(torch.stack(rows), lora_indices=[1, -1, 0]).logits
    assert_rows_equal(got, want)
    assert (got[0] - row_logits(folders, [0], rows[:1], base)[0]).abs().max() > 100 * TOLERANCE


def test_a_batch_without_adapters_is_the_base_model(folders: list[Path]) -> None:
    ids = torch.stack(prompts([9] * 2))
    with torch.no_grad():
        want = tiny_llama()(ids).logits
    with BatchLoRA(tiny_llama(), folders[1:2]) as m:
        torch.testing.assert_close(m(ids, lora_indices=[-1, -1]).logits, want, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_same_batch_twice_is_bitwise_equal_whatever_ran_between(folders: list[Path]) -> None:
    ids = torch.stack(prompts([9] * 6))
    with BatchLoRA(tiny_llama(), folders) as m:
        first = m(ids, lora_indices=LORA_INDICES).logits
        for width in range(1, 9):
            m(ids[:, :width], lora_indices=[0, 1, 2, 3, -1, 0])
        assert torch.equal(m(ids, lora_indices=LORA_INDICES).logits, first)


def test_the_callers_array_may_change_between_calls(folders: list[Path]) -> None:
    ids = torch.stack(prompts([5] * 2))
    indices = np.array([0, 1], np.int32)
    with BatchLoRA(tiny_llama(), folders) as m:
        first = m(ids, lora_indices=indices).logits
        indices[:] = [1, 0]
        second = m(ids, lora_indices=indices).logits
        assert torch.equal(second, m(ids, lora_indices=[1, 0]).logits)
    assert not torch.equal(first, second)


def test_inference_mode_may_come_and_go(folders: list[Path]) -> None:
    ids = torch.stack(prompts([5] * 2))
    with BatchLoRA(tiny_llama(), folders) as m:
        with torch.inference_mode():
            want = m(ids, lora_indices=[0, 1]).logits
        m(ids, lora_indices=[1, -1])
        assert torch.equal(m(ids, lora_indices=[0, 1]).logits, want)


def test_folders_and_weights_can_be_mixed(folders: list[Path]) -> None:
    ids = torch.stack(prompts([5] * 2))
    with BatchLoRA(tiny_llama(), [folders[0], LoRAWeight.from_peft(folders[1])]) as m:
        got = m(ids, lora_indices=[0, 1]).logits
    with BatchLoRA(tiny_llama(), folders) as m:
        assert torch.equal(m(ids, lora_indices=[0, 1]).logits, got)
