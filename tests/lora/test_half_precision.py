"""In 16 bit: as exact as PEFT in the same dtype; on a GPU through the compiled kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from punica_core import BatchLoRA, LoRALinear, LoRAWeight
from tests.lora.conftest import LORA_INDICES
from tests.support.numerics import assert_as_exact_as_torch
from tests.support.peft_adapters import tiny_llama
from tests.support.peft_batch import left_padded, prompts, row_logits

targets = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.bfloat16, id="cpu-bf16"),
        pytest.param("cuda", torch.bfloat16, id="gpu-bf16", marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, id="gpu-fp16", marks=pytest.mark.gpu),
    ],
)


def half_base(device: str, dtype: torch.dtype) -> Any:
    return tiny_llama().to(device, dtype)


def rounded_base(dtype: torch.dtype) -> Any:
    """The base with the weights of `half_base`, computing in fp32 on the CPU."""
    return tiny_llama().to(dtype).float()


def assert_as_exact_as_peft(
    got: list[Tensor], folders: list[Path], lora_indices: list[int], rows: list[Tensor], device: str, dtype: torch.dtype
) -> None:
    """got: [L, V] logits of each row. All rows count as one result: a row alone has too few numbers to judge by."""
    exact = row_logits(folders, lora_indices, rows, lambda: rounded_base(dtype))
    peft = row_logits(folders, lora_indices, rows, lambda: half_base(device, dtype))
    assert_as_exact_as_torch(torch.cat(got).cpu(), torch.cat(exact), torch.cat(peft).cpu())


@targets
def test_forward_is_as_exact_as_peft(folders: list[Path], device: str, dtype: torch.dtype) -> None:
    rows = prompts([33] * 6)
    with BatchLoRA(half_base(device, dtype), folders) as m:
        ids = torch.stack(rows).to(device)
        got = list(m(ids, lora_indices=LORA_INDICES).logits)
        wrong = list(m(ids, lora_indices=LORA_INDICES[::-1]).logits)
    assert_as_exact_as_peft(got, folders, LORA_INDICES, rows, device, dtype)
    with pytest.raises(AssertionError):
        assert_as_exact_as_peft(wrong, folders, LORA_INDICES, rows, device, dtype)


@targets
@pytest.mark.parametrize("num_beams", [1, 3])
def test_generate_decodes_as_exactly_as_peft(
    folders: list[Path], device: str, dtype: torch.dtype, num_beams: int
) -> None:
    """The logits of each decode step are those of the whole sequence: a near tie may fall either way in 16 bit."""
    prompt = prompts([4, 9, 7, 2, 9, 5], seed=3)
    ids, mask = (tensor.to(device) for tensor in left_padded(prompt))
    with BatchLoRA(half_base(device, dtype), folders) as m:
        output = m.generate(
            ids,
            attention_mask=mask,
            lora_indices=LORA_INDICES,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            do_sample=False,
            max_new_tokens=8,
            min_new_tokens=8,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    steps = torch.stack(output.logits, 1)
    beams = getattr(output, "beam_indices", None)
    indices = [index for index in LORA_INDICES for _ in range(num_beams)]
    rows = [
        torch.cat([prompt[row // num_beams], sequence[ids.size(1) :].cpu()])
        for row, sequence in enumerate(output.sequences)
    ]
    got, wanted = [], []
    for row, sequence in enumerate(rows):
        length = prompt[row // num_beams].numel()
        for step in range(sequence.numel() - length):
            source = row if beams is None else int(beams[row, step])
            got.append(steps[source, step][None])
            wanted.append((row, length + step - 1))
    exact = row_logits(folders, indices, rows, lambda: rounded_base(dtype))
    peft = row_logits(folders, indices, rows, lambda: half_base(device, dtype))
    assert_as_exact_as_torch(
        torch.cat(got).cpu(),
        torch.stack([exact[row][place] for row, place in wanted]),
        torch.stack([peft[row][place] for row, place in wanted]).cpu(),
    )


@pytest.mark.gpu
def test_rows_without_adapter_have_the_bits_of_the_base() -> None:
    layer = torch.nn.Linear(512, 384, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(5, 7, 512, device="cuda", dtype=torch.bfloat16)
    weight = LoRAWeight(torch.randn(8, 512), torch.randn(384, 8))
    with torch.no_grad():
        base = layer(x.view(35, 512)).view(5, 7, 384)
    with BatchLoRA(LoRALinear.from_linear(layer), [weight]) as m:
        got = m(x, lora_indices=[-1, 0, -1, 0, -1])
    assert torch.equal(got[::2], base[::2])
    assert not torch.equal(got[1::2], base[1::2])


@pytest.mark.gpu
def test_compiled_decoding_gives_the_same_logits(folders: list[Path]) -> None:
    """Inductor, with all adapters in one graph and a change of the mix without a new one."""
    model = half_base("cuda", torch.bfloat16)
    ids = torch.stack(prompts([1] * 6)).cuda()
    with BatchLoRA(model, folders) as m:
        mixes = [LORA_INDICES, LORA_INDICES[::-1], [3] * 6]
        eager = [m(ids, lora_indices=mix).logits for mix in mixes]
        model.compile(fullgraph=True)
        compiled = [m(ids, lora_indices=mix).logits for mix in mixes]
    exact = [
        torch.cat(row_logits(folders, mix, list(ids.cpu()), lambda: rounded_base(torch.bfloat16))) for mix in mixes
    ]
    for got, want, same in zip(compiled, exact, eager, strict=True):
        assert_as_exact_as_torch(got.flatten(0, 1).cpu(), want, same.flatten(0, 1).cpu())


@pytest.mark.gpu
def test_a_model_in_float32_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is in torch\.float32; on a GPU"):
        BatchLoRA(tiny_llama().cuda(), [])
