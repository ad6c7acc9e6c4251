"""The demo's model and adapters on the GPU in 16 bits: no further from fp32 than twice PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from punica_core.engine.graphs import GraphSizes
from punica_core.lora.weights import load_adapter
from punica_core.model.demo import cache_root
from punica_core.ops import cuda
from punica_core.scheduler.plan import BASE_SLOT
from tests.support.driven_device_runner import DrivenDeviceRunner
from tests.support.driven_runner import random_prompt
from tests.support.numerics import relative_error
from tests.support.peft_adapters import adapter_ref, linear_shapes, peft_warnings_ignored

ADAPTERS = sorted(path for path in Path("examples/adapters").resolve().iterdir() if path.is_dir())
DEMO = cache_root() / "models" / "smollm2-135m-instruct"
PROMPTS = ((BASE_SLOT, 17), (0, 1), (1, 15), (2, 112), (3, 113), (0, 111), (1, 16), (BASE_SLOT, 60))
NEW_TOKENS = 5

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
def test_the_demo_is_as_near_the_reference_as_peft(dtype: torch.dtype) -> None:
    cuda.load()
    shapes = linear_shapes(build())
    adapters = {slot: load_adapter(adapter_ref(folder), shapes, dtype, 256) for slot, folder in enumerate(ADAPTERS)}
    graphs = GraphSizes((2, 8), (0, 8), (64, 256), whole_mixed=True)
    driven = DrivenDeviceRunner(build().to("cuda", dtype), adapters, flashinfer=True, graphs=graphs)
    sequences = [driven.sequence(random_prompt(n, 49152, seed=i), slot) for i, (slot, n) in enumerate(PROMPTS)]
    continuations = [random_prompt(NEW_TOKENS, 49152, seed=100 + i) for i in range(len(PROMPTS))]
    driven.teacher_force(sequences, continuations, 64)
    ours = theirs = 0.0
    nearest_other = float("inf")
    for (slot, _), sequence in zip(PROMPTS, sequences, strict=True):
        logits = driven.logits_of(sequence).cpu()
        token_ids = sequence.token_ids[:-1]
        reference = whole_logits(slot, token_ids, torch.float32, "cpu")[-len(logits) :]
        ours = max(ours, relative_error(logits, reference))
        theirs = max(theirs, relative_error(whole_logits(slot, token_ids, dtype, "cuda")[-len(logits) :], reference))
        other = BASE_SLOT if slot != BASE_SLOT else 0
        wrong = whole_logits(other, token_ids, torch.float32, "cpu")[-len(logits) :]
        nearest_other = min(nearest_other, relative_error(logits, wrong))
    print(f"{dtype}: error {ours:.4f}, PEFT's {theirs:.4f}, to the nearest wrong adapter {nearest_other:.4f}")
    assert theirs > 0
    assert ours <= 2 * theirs, f"ours {ours:.3g}, PEFT's {theirs:.3g}"
    assert nearest_other > 2 * ours, f"a wrong adapter is {nearest_other:.3g} away, the right one {ours:.3g}"
