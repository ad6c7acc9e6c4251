"""Embedding, head and trained tokens of adapters in the arena: a step makes of them what the plain path does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from punica_core.errors import AdapterTooLarge, AdapterUnsupported
from punica_core.lora.arena_layout import lay_out
from punica_core.lora.gpu_tier import GpuAdapterTier
from punica_core.lora.layers import LinearGroup
from punica_core.lora.linear import linear
from punica_core.lora.plan import Segment
from punica_core.lora.segmented import SegmentedLoRA
from punica_core.lora.table_modules import TableModules, VocabularyRecord
from punica_core.lora.table_step import TableLoRA
from punica_core.lora.tables import ModuleWeights, shape_of
from punica_core.lora.vocabulary_step import VocabularyStep
from punica_core.lora.weights import AdapterWeights, TrainedRows, VocabularyWeights
from punica_core.scheduler.plan import AdapterGrant, SkipReason
from tests.support.memory_adapters import GROUPS, MemoryAdapters, granted, make_weights, settle
from tests.tiers.conftest import MakeTier

VOCAB, HIDDEN = 37, 24
HEAD = LinearGroup(len(GROUPS), ("lm_head",), HIDDEN, (VOCAB,))
HEAD_BIAS = torch.linspace(-2, 2, VOCAB)
MODULES = TableModules(GROUPS, HEAD, HEAD_BIAS)
MAX_ROWS = 8


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        from punica_core.ops import cuda

        cuda.load()
    return str(request.param)


def precision(device: str) -> tuple[torch.dtype, float]:
    """What the ops take there, and how far from exact they may be, as a part of the largest value."""
    return (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 2e-2)


def draw(seed: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator).to(dtype)


def trained(new: Callable[..., Tensor], *token_ids: int) -> TrainedRows:
    return TrainedRows(torch.tensor(token_ids), new(len(token_ids), HIDDEN))


def lookup(new: Callable[..., Tensor], lora_rank: int, *, gain: bool = False) -> ModuleWeights:
    """LoRA on the embedding."""
    return ModuleWeights(new(VOCAB, lora_rank).t(), new(HIDDEN, lora_rank), 0.75, new(HIDDEN) if gain else None)


def on_head(new: Callable[..., Tensor], lora_rank: int, *, extras: bool = False) -> ModuleWeights:
    more = (new(VOCAB), new(VOCAB)) if extras else (None, None)
    return ModuleWeights(new(lora_rank, HIDDEN), new(VOCAB, lora_rank), 1.5, *more)


KINDS: dict[str, Callable[[Callable[..., Tensor]], tuple[ModuleWeights | None, dict[str, Any]]]] = {
    "embedding LoRA": lambda new: (None, {"embedding": lookup(new, 16)}),
    "embedding DoRA": lambda new: (None, {"embedding": lookup(new, 3, gain=True)}),
    "saved embedding": lambda new: (None, {"embedding_matrix": new(VOCAB, HIDDEN)}),
    "embedding rows": lambda new: (None, {"embedding_rows": trained(new, 0, 5, 36)}),
    "head LoRA": lambda new: (on_head(new, 5), {}),
    "head with gain and bias": lambda new: (on_head(new, 1, extras=True), {}),
    "saved head": lambda new: (None, {"head_matrix": new(VOCAB, HIDDEN)}),
    "head rows and LoRA": lambda new: (on_head(new, 8), {"head_rows": trained(new, 2, 3)}),
    "both saved": lambda new: (None, {"head_matrix": new(VOCAB, HIDDEN), "embedding_matrix": new(VOCAB, HIDDEN)}),
    "rows of both": lambda new: (None, {"head_rows": trained(new, 9), "embedding_rows": trained(new, 9)}),
    "all LoRA": lambda new: (on_head(new, 2), {"embedding": lookup(new, 7)}),
    "plain": lambda new: (None, {}),
}


def adapter(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> AdapterWeights:
    """On all linears with rank 2, and what `kind` says."""
    head, parts = KINDS[kind](draw(seed + 100, dtype))
    plain = make_weights(f"{kind} {seed}", 2, seed=seed, dtype=dtype)
    modules = plain.modules if head is None else {**plain.modules, "lm_head": head}
    return replace(plain, modules=modules, vocabulary=VocabularyWeights(**parts) if parts else None)


def num_elements(weights: AdapterWeights) -> int:
    """That it takes of the arena."""
    return lay_out({index: shape_of(module) for index, module in MODULES.arranged(weights).items()}).num_elements


def exact(weights: AdapterWeights) -> AdapterWeights:
    """The same numbers in fp64."""

    def wide(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.double()
        if isinstance(value, TrainedRows):
            return TrainedRows(value.token_ids, value.rows.double())
        if isinstance(value, ModuleWeights):
            parts = (value.a, value.b, value.scale, value.row_gain, value.bias)
            return ModuleWeights(*(wide(part) for part in parts))
        return value

    names = VocabularyWeights.__dataclass_fields__
    found = weights.vocabulary
    vocabulary = None if found is None else VocabularyWeights(**{name: wide(getattr(found, name)) for name in names})
    return AdapterWeights(weights.key, {p: wide(m) for p, m in weights.modules.items()}, 0, vocabulary)


def step_over(tier: GpuAdapterTier) -> tuple[TableLoRA, VocabularyStep]:
    lora = TableLoRA(tier.tables, tier.arena, max_rows=MAX_ROWS, max_rank=16)
    options = {"max_rows": MAX_ROWS, "max_segments": 4}
    return lora, VocabularyStep(lora, tier.tables, tier.arena, MODULES, tier.vocabulary, **options)


class Trial:
    """A step of rows of two adapters and the base, through the arena (`found`) and by the plain path (`right`)."""

    def __init__(self, tier: GpuAdapterTier, dtype: torch.dtype, seed: int = 0) -> None:
        self.lora, self.step = step_over(tier)
        self.device = tier.arena.buffer.device
        self.head_table = tier.tables.group(MODULES.index(VocabularyRecord.HEAD), 1)
        self.plain = SegmentedLoRA(GROUPS, 1 << 20, torch.device("cpu"), HEAD, HEAD_BIAS.double())
        new = draw(seed + 1000, dtype)
        self.table, self.head, self.x = new(VOCAB, HIDDEN), new(VOCAB, HIDDEN), new(5, HIDDEN)
        self.token_ids = torch.tensor([5, 36, 9, 5, 0, 9, 5, 0], dtype=torch.int32)

    def embed(self, slots: list[int], adapters: list[AdapterWeights]) -> tuple[Tensor, Tensor, Tensor]:
        """(found, right, without adapters): embeddings of two rows of the base, then three of each adapter."""
        row_slots = np.array([-1, -1, *np.repeat(slots, 3)], np.int32)
        self.lora.begin(row_slots)
        # A decode step has as many logits as rows; a prompt fewer: the head's rows are cut otherwise.
        self.step.begin(row_slots, np.array([-1, slots[0], slots[1], slots[1], -1], np.int32))
        before = self.table[self.token_ids.long()]
        found = before.to(self.device, copy=True)
        self.step.embed(self.token_ids.to(self.device), found)
        right = before.double()
        segments = [Segment(2 + 3 * i, 5 + 3 * i, exact(weights)) for i, weights in enumerate(adapters)]
        plain = self.plain.embedding_step(segments)
        if plain is not None:
            plain.embed(self.token_ids.long(), right)
        return found.cpu(), right, before

    def logits(self, adapters: list[AdapterWeights]) -> tuple[Tensor, Tensor, Tensor]:
        """The same of logits, for the step begun last."""
        x, weight, bias = (part.to(self.device) for part in (self.x, self.head, HEAD_BIAS.to(self.x.dtype)))
        found = self.step.product(self.head_table, HEAD.out_features, x, weight, bias)
        before = linear(x, weight, bias).cpu()
        right = before.double()
        segments = [Segment(1, 2, exact(adapters[0])), Segment(2, 4, exact(adapters[1]))]
        plain = self.plain.head_step(segments)
        if plain is not None:
            plain.add(HEAD, self.x.double(), right)
        return found.cpu(), right, before


def assert_close(found: Tensor, right: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), right, rtol=0, atol=tolerance * float(right.abs().max()))


def test_every_kind_is_what_the_plain_path_makes_of_it_while_others_come_and_go(
    make_tier: MakeTier, adapters: MemoryAdapters, device: str
) -> None:
    dtype, tolerance = precision(device)
    weights = [adapter(kind, seed, dtype) for seed, kind in enumerate(KINDS)]
    refs = [adapters.add(found.key, found) for found in weights]
    room = sum(sorted(map(num_elements, weights))[-3:])
    tier = make_tier(room, modules=MODULES, dtype=dtype, host_bytes=1 << 24)
    changed = set()
    for turn in range(2 * len(refs)):
        pair = [turn % len(refs), (5 * turn + 1) % len(refs)]
        used = [weights[i] for i in pair]
        slots = [granted(tier, refs[i]).slot for i in pair]
        trial = Trial(tier, dtype, turn)
        embedded = trial.embed(slots, used)
        assert_close(*embedded[:2], tolerance)
        assert torch.equal(embedded[0][:2], embedded[2][:2]), "rows of the base"
        logits = trial.logits(used)
        assert_close(*logits[:2], tolerance)
        assert torch.equal(logits[0][[0, 4]], logits[2][[0, 4]]), "rows of the base"
        for i, rows, place in ((0, slice(2, 5), slice(1, 2)), (1, slice(5, 8), slice(2, 4))):
            kind = list(KINDS)[pair[i]]
            if not torch.equal(embedded[0][rows], embedded[2][rows]):
                changed.add((kind, "embedding"))
            if not torch.equal(logits[0][place], logits[2][place]):
                changed.add((kind, "head"))
        for i in pair:
            tier.release(refs[i])
    assert tier.stats().evictions > len(refs)
    both = ("both saved", "rows of both", "all LoRA")
    assert changed == {(kind, part) for kind in KINDS for part in ("embedding", "head") if part in kind or kind in both}


def test_the_wrong_adapter_shows(make_tier: MakeTier, adapters: MemoryAdapters, device: str) -> None:
    dtype, tolerance = precision(device)
    tier = make_tier(modules=MODULES, dtype=dtype)
    used = [adapter("both saved", 1, dtype), adapter("all LoRA", 2, dtype)]
    slots = [granted(tier, adapters.add(weights.key, weights)).slot for weights in used]
    trial = Trial(tier, dtype)
    for swapped in (False, True):
        found, right, _ = trial.embed(slots, used[::-1] if swapped else used)
        logits, right_logits, _ = trial.logits(used[::-1] if swapped else used)
        for got, wanted in ((found, right), (logits, right_logits)):
            near = 2 * tolerance * float(wanted.abs().max())
            assert torch.allclose(got.double(), wanted, rtol=0, atol=near) != swapped


def test_an_adapter_without_any_lora_has_work_in_the_plan(
    make_tier: MakeTier, adapters: MemoryAdapters, device: str
) -> None:
    dtype, tolerance = precision(device)
    used = [replace(adapter("saved head", seed, dtype), modules={}) for seed in range(2)]
    tier = make_tier(modules=MODULES, dtype=dtype)
    slots = [granted(tier, adapters.add(weights.key, weights)).slot for weights in used]
    assert tier.slot_rank[slots].tolist() == [1, 1]
    trial = Trial(tier, dtype)
    embedded, _, before = trial.embed(slots, used)
    assert torch.equal(embedded, before)
    found, right, before = trial.logits(used)
    assert_close(found, right, tolerance)
    assert not torch.allclose(found[1:4], before[1:4], atol=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_lies_in_the_arena_is_counted_and_given_back(
    make_tier: MakeTier, adapters: MemoryAdapters, kind: str
) -> None:
    weights = adapter(kind)
    size = num_elements(weights)
    tier = make_tier(size, modules=MODULES, buffer_bytes=256)
    ref = adapters.add("a", weights)
    slot = granted(tier, ref).slot
    assert tier.arena.num_free == 0
    assert tier.stats().gpu_bytes_used == 4 * size
    assert (slot in tier.vocabulary) == (kind != "plain")
    _, step = step_over(tier)
    assert step.concerns([slot]) == (kind != "plain")
    assert not step.concerns([-1, slot + 1])
    tier.release(ref)
    tier.forget(ref.path)
    assert tier.arena.num_free == size
    assert tier.vocabulary == {}
    assert not step.concerns([slot])


def test_a_slot_used_again_has_nothing_of_the_adapter_before(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    tier = make_tier(num_elements(adapter("both saved")), modules=MODULES, num_slots=1)
    before = adapters.add("before", adapter("both saved", 1))
    slot = granted(tier, before).slot
    tier.release(before)
    plain = adapters.add("plain", adapter("plain", 2))
    assert granted(tier, plain).slot == slot
    records = tier.tables.records[:, slot].cpu()
    assert (records[MODULES.index(VocabularyRecord.HEAD) :] == 0).all()
    assert tier.vocabulary == {}


def test_a_matrix_that_does_not_fit_is_refused_or_waits(make_tier: MakeTier, adapters: MemoryAdapters) -> None:
    large, plain = adapter("saved head", 1), adapter("plain", 2)
    tier = make_tier(num_elements(large), modules=MODULES)
    pinned = adapters.add("plain", plain)
    granted(tier, pinned)
    ref = adapters.add("large", large)
    assert settle(tier, ref) is SkipReason.ADAPTER_NO_ROOM
    assert tier.vocabulary == {}
    tier.release(pinned)
    assert isinstance(settle(tier, ref), AdapterGrant)
    small = make_tier(num_elements(large) - 8, modules=MODULES)
    assert isinstance(settle(small, ref), AdapterTooLarge)


def test_a_copy_that_fails_leaves_no_entry(
    make_tier: MakeTier, adapters: MemoryAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    from punica_core.lora.arena_writer import ArenaWriter

    def break_down(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("a bus error")

    tier = make_tier(modules=MODULES)
    monkeypatch.setattr(ArenaWriter, "write", break_down)
    assert not isinstance(settle(tier, adapters.add("a", adapter("saved head"))), AdapterGrant)
    assert tier.vocabulary == {}


@pytest.mark.parametrize("kind", ["saved head", "head rows and LoRA", "rows of both"])
def test_a_head_that_the_model_does_not_have_is_refused(
    make_tier: MakeTier, adapters: MemoryAdapters, kind: str
) -> None:
    tier = make_tier(modules=TableModules(GROUPS))
    assert isinstance(settle(tier, adapters.add("a", adapter(kind))), AdapterUnsupported)
