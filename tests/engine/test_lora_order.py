"""A step of many rows whose base products are added to what adapters wrote, beside the same step in the usual order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from punica_core import ops
from punica_core.engine.forward import ModelForward
from punica_core.engine.graphs import GraphKey, GraphSizes
from punica_core.engine.step_batch import StepBatch, exact_sizes, split_rows
from punica_core.lora.table_step import LoRAOrder
from punica_core.scheduler.plan import BASE_SLOT
from tests.engine.test_gpu_parity import build, whole_logits
from tests.support.adapter_formats import load_for
from tests.support.driven_device_runner import DrivenDeviceRunner
from tests.support.driven_runner import DrivenRunner, random_prompt
from tests.support.numerics import relative_error
from tests.support.peft_adapters import save_peft_adapter

ADAPTERS: tuple[dict[str, Any], ...] = (
    {"r": 16},
    {"r": 4, "target_modules": ["q_proj", "down_proj"]},
    {"r": 8, "use_dora": True},
)
DORA = 2
PROMPTS = ((BASE_SLOT, 90), (BASE_SLOT, 3), (0, 100), (1, 80), (0, 2))
"""More than 256 rows; adapter 1 lacks slices of one group and all of another."""
NUM_BASE = 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    root = tmp_path_factory.mktemp("adapters")

    def make(name: str) -> list[Path]:
        paths = [root / name / str(i) for i in range(len(ADAPTERS))]
        for index, (path, config) in enumerate(zip(paths, ADAPTERS, strict=True)):
            if not path.exists():
                save_peft_adapter(path, build(name), seed=index, std=0.1, **config)
        return paths

    return make


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        from punica_core.ops import cuda

        cuda.load()
    return str(request.param)


class Trial:
    """One step of `prompts`, (slot, tokens) each: fp32 on the CPU, bf16 on a GPU. The base's are the first."""

    def __init__(
        self,
        name: str,
        folders: list[Path],
        device: str,
        prompts: tuple[tuple[int, int], ...],
        *,
        compiled: bool = False,
    ) -> None:
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        loaded = DrivenRunner(build(name).to(self.dtype)).loaded
        adapters = {slot: load_for(loaded, folder) for slot, folder in enumerate(folders)}
        base = build(name).to(device, self.dtype)
        self.driven = DrivenDeviceRunner(base, adapters, flashinfer=device == "cuda", compiled=compiled)
        self.name, self.folders, self.device = name, folders, device
        self.prompts = [(slot, random_prompt(length, 512, seed=i)) for i, (slot, length) in enumerate(prompts)]
        self.rows = [self.driven.row(self.driven.sequence(ids, slot), 1000) for slot, ids in self.prompts]

    def logits(self, order: LoRAOrder) -> Tensor:
        """fp32 [prompts, V] of each prompt's last token."""
        driven, (decode, prompts) = self.driven, split_rows(self.rows)
        assert driven.lora is not None
        with torch.inference_mode():
            batch = driven.packer.pack(decode, prompts, {}, exact_sizes(decode, prompts), in_graph=False)
            driven.attention.inner.begin(batch.attention)
            driven.lora.begin(batch.row_slots)
            return driven.forward(batch, order)[[part.first for part in batch.logits]].float().cpu()

    def peft(self, dtype: torch.dtype, device: str) -> Tensor:
        """The same by transformers and PEFT."""
        whole = [whole_logits(self.name, self.folders, slot, ids, dtype, device) for slot, ids in self.prompts]
        return torch.stack([logits[-1] for logits in whole])

    def check(self, found: Tensor) -> None:
        """Fail unless `found` is at most twice as far from PEFT in fp32 as PEFT in the step's dtype is."""
        right = self.peft(torch.float32, "cpu")
        allowed = 1e-5 if self.device == "cpu" else 2 * relative_error(self.peft(self.dtype, self.device), right)
        error = relative_error(found, right)
        assert error <= allowed, f"{error:.3g} > {allowed:.3g}"


@pytest.mark.parametrize("name", ["llama", "qwen2"], ids=["no bias", "bias of q, k and v"])
def test_both_orders_compute_the_same_step(name: str, device: str, folders: Callable[[str], list[Path]]) -> None:
    trial = Trial(name, folders(name), device, PROMPTS)
    ahead, beside, base = (trial.logits(order) for order in (LoRAOrder.AHEAD, LoRAOrder.BESIDE, LoRAOrder.NONE))
    trial.check(ahead)
    trial.check(beside)
    assert torch.equal(ahead[:NUM_BASE], base[:NUM_BASE]), "rows of the base keep their bits"
    assert torch.equal(beside[:NUM_BASE], base[:NUM_BASE])
    assert all(relative_error(ahead[i], base[i]) > 0.1 for i in range(NUM_BASE, len(PROMPTS)))


def test_memory_that_was_not_written_would_show(
    device: str, folders: Callable[[str], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What expand would do if it forgot rows and slices without adapter."""
    expand = ops.lora_expand

    def forgetful(y: Tensor, *arguments: Any, overwrite: bool, **options: Any) -> None:
        expand(y.fill_(0.5), *arguments, **options)

    trial = Trial("llama", folders("llama"), device, PROMPTS)
    base = trial.logits(LoRAOrder.NONE)
    monkeypatch.setattr(ops, "lora_expand", forgetful)
    wrong = trial.logits(LoRAOrder.AHEAD)
    assert not torch.equal(wrong[:NUM_BASE], base[:NUM_BASE])
    with pytest.raises(AssertionError, match=">"):
        trial.check(wrong)


def test_a_step_with_a_gain_needs_the_base_product_first(device: str, folders: Callable[[str], list[Path]]) -> None:
    trial = Trial("llama", folders("llama"), device, (*PROMPTS, (DORA, 5)))
    trial.check(trial.logits(LoRAOrder.BESIDE))
    with pytest.raises(AssertionError, match=">"):
        trial.check(trial.logits(LoRAOrder.AHEAD))
    assert launched(trial) == [LoRAOrder.BESIDE]
    trial.check(torch.stack([trial.driven.logits_of(row.sequence)[0] for row in trial.rows]).cpu())


@pytest.mark.parametrize(
    ("prompts", "order"),
    [
        (PROMPTS, LoRAOrder.AHEAD),
        (PROMPTS[:3], LoRAOrder.BESIDE),
        (PROMPTS[:2], LoRAOrder.NONE),
        ((*PROMPTS, (DORA, 1)), LoRAOrder.BESIDE),
    ],
    ids=["many rows", "few rows", "base", "many rows, one with a gain"],
)
def test_the_runner_chooses_the_order_of_each_step(
    prompts: tuple[tuple[int, int], ...], order: LoRAOrder, device: str, folders: Callable[[str], list[Path]]
) -> None:
    assert launched(Trial("llama", folders("llama"), device, prompts)) == [order]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
def test_what_was_warmed_up_is_not_compiled_again(device: str, folders: Callable[[str], list[Path]]) -> None:
    torch._dynamo.reset()
    trial = Trial("llama", folders("llama"), device, PROMPTS, compiled=True)
    *warm, left_out = LoRAOrder.NONE, LoRAOrder.AHEAD, LoRAOrder.BESIDE
    for order in warm:
        trial.driven.runner.warm_up(512, order)
    with torch.compiler.set_stance("fail_on_recompile"):
        for order in warm:
            trial.driven.runner.warm_up(300, order)
            trial.logits(order)
        with pytest.raises(RuntimeError, match="recompile"):
            trial.driven.runner.warm_up(300, left_out)
    trial.check(trial.logits(LoRAOrder.AHEAD))


def launched(trial: Trial) -> list[LoRAOrder]:
    """The orders that the model is called with for a launch of the trial's step."""
    orders: list[LoRAOrder] = []
    forward: ModelForward = trial.driven.runner._forward

    def recording(batch: StepBatch, order: LoRAOrder, **options: Any) -> Tensor:
        orders.append(order)
        return forward(batch, order, **options)

    trial.driven.runner._forward = recording  # type: ignore[assignment]
    trial.driven.step([row.sequence for row in trial.rows])
    return orders


class RecordingGraphs:
    """Stands where captured steps stand: notes what would be replayed, which yields zeros."""

    def __init__(self, vocab_size: int) -> None:
        self.sizes = GraphSizes(decode=(8,), mixed=(0, 8), prompt_rows=(64, 384))
        self.keys: list[GraphKey] = []
        self._vocab_size = vocab_size

    def replay(self, key: GraphKey) -> Tensor:
        self.keys.append(key)
        return torch.zeros(key.sizes.num_logits, self._vocab_size)


def test_a_captured_step_is_replayed_in_the_order_of_its_padded_size(folders: Callable[[str], list[Path]]) -> None:
    expected = {
        ((0, 100), (BASE_SLOT, 90), (1, 80)): LoRAOrder.AHEAD,
        ((0, 100), (BASE_SLOT, 2)): LoRAOrder.AHEAD,  # padded to 384
        ((0, 30), (BASE_SLOT, 2)): LoRAOrder.BESIDE,
        ((BASE_SLOT, 90), (BASE_SLOT, 100)): LoRAOrder.NONE,
        ((0, 100), (DORA, 3)): LoRAOrder.BESIDE,
    }
    for prompts, order in expected.items():
        trial = Trial("llama", folders("llama"), "cpu", prompts)
        graphs = RecordingGraphs(trial.driven.loaded.vocab_size)
        trial.driven.runner.graphs = graphs  # type: ignore[assignment]
        trial.driven.step([row.sequence for row in trial.rows])
        assert [(key.order, key.sizes.num_prompt_rows) for key in graphs.keys] == [
            (order, 64 if sum(length for _, length in prompts) <= 64 else 384)
        ]


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_a_step_of_larger_lora_ranks_than_its_order_takes_is_not_launched(
    captured: bool, folders: Callable[[str], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial("llama", folders("llama"), "cpu", ((BASE_SLOT, 9), (0, 3)))
    lora, sequences = trial.driven.lora, [row.sequence for row in trial.rows]
    assert lora is not None
    if captured:
        trial.driven.runner.graphs = RecordingGraphs(trial.driven.loaded.vocab_size)  # type: ignore[assignment]
    monkeypatch.setattr(lora, "order", lambda row_slots: LoRAOrder.INSIDE)
    trial.driven.step(sequences)
    lora._slot_rank[0] = 70
    with pytest.raises(ValueError, match="lora_ranks up to 72, INSIDE takes at most 64"):
        trial.driven.step(sequences)
