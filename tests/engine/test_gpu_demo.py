"""The demo's model and adapters on the GPU in 16 bits: no further from fp32 than twice PEFT.

On a GPU that `ops.lora_linear` has its kernel for, that kernel computes all layers in steps of up to 64 rows, and in
steps of up to 128 all but q, k and v.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from punica_core.engine.graphs import GraphSizes
from punica_core.lora.table_step import LoRAOrder, most_inside_rows
from punica_core.lora.weights import load_adapter
from punica_core.model.demo import cache_root
from punica_core.ops import cuda
from punica_core.ops.linear import MAX_LINEAR_ROWS, fits_kernel
from punica_core.scheduler.plan import BASE_SLOT
from tests.support.driven_device_runner import DrivenDeviceRunner, slots_by_order
from tests.support.driven_runner import random_prompt
from tests.support.numerics import relative_error
from tests.support.peft_adapters import adapter_ref, linear_shapes, peft_warnings_ignored

ADAPTERS = sorted(path for path in Path("examples/adapters").resolve().iterdir() if path.is_dir())
DEMO = cache_root() / "models" / "smollm2-135m-instruct"
PROMPTS = ((BASE_SLOT, 17), (0, 1), (1, 15), (2, 112), (3, 113), (0, 111), (1, 16), (BASE_SLOT, 60))
NEW_TOKENS = 15

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (DEMO / "config.json").is_file(), reason="the demo model, which `make serve` prepares"),
]


def build() -> PreTrainedModel:
    """The demo model, in fp32 on the CPU."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    return model.eval()


def whole_logits(slot: int, token_ids: list[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Logits [T, V] of transformers and PEFT on the whole sequence."""
    model: Any = build().to(device, dtype)
    with peft_warnings_ignored(), torch.no_grad():
        if slot != BASE_SLOT:
            model = PeftModel.from_pretrained(model, ADAPTERS[slot]).to(device, dtype).eval()
        logits: torch.Tensor = model(torch.tensor([token_ids], device=device)).logits[0]
    return logits.float().cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_demo_is_as_near_the_reference_as_peft(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.load()
    seen = slots_by_order(monkeypatch)
    shapes = linear_shapes(build())
    adapters = {slot: load_adapter(adapter_ref(folder), shapes, dtype, 256) for slot, folder in enumerate(ADAPTERS)}
    graphs = GraphSizes((2, 8), (0, 8), (64, 256), whole_mixed=True, inside_rows=MAX_LINEAR_ROWS)
    driven = DrivenDeviceRunner(build().to("cuda", dtype), adapters, flashinfer=True, graphs=graphs)
    sequences = [driven.sequence(random_prompt(n, 49152, seed=i), slot) for i, (slot, n) in enumerate(PROMPTS)]
    continuations = [random_prompt(NEW_TOKENS, 49152, seed=100 + i) for i in range(len(PROMPTS))]
    driven.teacher_force(sequences, continuations, 64)
    assert seen[LoRAOrder.INSIDE] == {*adapters}
    if fits_kernel(driven.loaded.device):
        assert most_inside_rows(driven.loaded.groups, driven.loaded.device) == MAX_LINEAR_ROWS
    found, exact, peft = [], [], []
    nearest_other = float("inf")
    for (slot, _), sequence in zip(PROMPTS, sequences, strict=True):
        token_ids = sequence.token_ids[:-1]
        found.append(driven.logits_of(sequence).cpu())
        exact.append(whole_logits(slot, token_ids, torch.float32, "cpu")[-NEW_TOKENS:])
        peft.append(whole_logits(slot, token_ids, dtype, "cuda")[-NEW_TOKENS:])
        other = BASE_SLOT if slot != BASE_SLOT else 0
        wrong = whole_logits(other, token_ids, torch.float32, "cpu")[-NEW_TOKENS:]
        nearest_other = min(nearest_other, relative_error(found[-1], wrong))
    # Over all rows: of single ones the error of bf16 varies tenfold, ours and PEFT's in different places.
    ours, theirs = (relative_error(torch.cat(each), torch.cat(exact)) for each in (found, peft))
    print(f"{dtype}: error {ours:.4f}, PEFT's {theirs:.4f}, to the nearest wrong adapter {nearest_other:.4f}")
    assert theirs > 0
    assert ours <= 2 * theirs, f"ours {ours:.3g}, PEFT's {theirs:.3g}"
    assert nearest_other > 2 * ours, f"a wrong adapter is {nearest_other:.3g} away, the right one {ours:.3g}"
