"""A `DeviceRunner` driven by hand, on any device: the parts that a GPU step goes through, attention aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from punica_core.config import BLOCK_SIZE
from punica_core.engine.device_runner import DeviceRunner
from punica_core.engine.forward import ModelForward
from punica_core.engine.graphs import GraphSizes
from punica_core.engine.step_batch import BatchSizes, StepPacker
from punica_core.lora.arena_layout import Run, lay_out
from punica_core.lora.arena_writer import ArenaWriter
from punica_core.lora.segments import Int32Array
from punica_core.lora.table_modules import TableModules, largest_rank
from punica_core.lora.table_step import LoRAOrder, TableLoRA, bind_tables
from punica_core.lora.tables import AdapterTables, Arena, is_affine, shape_of
from punica_core.lora.vocabulary_step import VocabularyStep, slot_vocabulary
from punica_core.lora.weights import AdapterWeights
from punica_core.model.attention_op import GatheredAttention, OpAttention
from punica_core.model.flashinfer import FlashInferAttention
from punica_core.model.loader import LoadedModel
from punica_core.protocol import TokenLogprobs
from punica_core.scheduler.plan import RowPlan, SampledToken
from punica_core.scheduler.sequence import Sequence as Running
from tests.support.driven_runner import BLOCKS_EACH, DrivenRunner, RecordingSampler

MAX_ROWS = 1024
MAX_SEQS = 16
NO_GRAPHS = GraphSizes()


@dataclass
class _Samples:
    token_ids: Tensor
    logits: Tensor

    def result(self) -> list[SampledToken | None]:
        finite = torch.isfinite(self.logits).all(-1).tolist()
        tokens = self.token_ids.tolist()
        return [SampledToken(token) if fine else None for token, fine in zip(tokens, finite, strict=True)]


class GreedySampler(RecordingSampler):
    """A `DeviceSampler` that records logits as `RecordingSampler` does."""

    def launch(self, logits: Tensor, rows: Sequence[RowPlan]) -> _Samples:
        logits = logits.float().clone()
        for row, scores in zip(rows, logits, strict=True):
            self.logits.setdefault(row.sequence.request_id, []).append(scores)
        return _Samples(logits.argmax(-1), logits)

    def prompt_logprobs(self, logits: Tensor, token_ids: list[int], top: int) -> list[TokenLogprobs]:
        return super().prompt_logprobs(logits.float(), token_ids, top)


class DrivenDeviceRunner(DrivenRunner):
    """Like `DrivenRunner`, through packed tables, the SGMV ops and (if `compiled`) torch.compile.

    flashinfer: attention as it is served on a GPU, else in plain torch. own_kernel: with our kernel for decode rows.
    graphs: steps to capture.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        adapters: Mapping[int, AdapterWeights] | None = None,
        *,
        compiled: bool = False,
        flashinfer: bool = False,
        own_kernel: bool = True,
        graphs: GraphSizes = NO_GRAPHS,
    ) -> None:
        super().__init__(base, adapters)
        loaded, device = self.loaded, self.loaded.device
        self.lora, self.vocabulary = table_lora(self.loaded, self.adapters) if self.adapters else (None, None)
        self.sampler = GreedySampler()
        specs = loaded.attention_specs
        if flashinfer:
            inner: Any = FlashInferAttention(
                self.kv_cache,
                loaded.num_heads,
                specs,
                MAX_SEQS,
                max_prompt_rows=MAX_ROWS,
                max_prompts=MAX_SEQS,
                own_kernel=own_kernel,
            )
        else:
            inner = GatheredAttention(self.kv_cache, specs)
        self.attention = OpAttention(inner)
        self.packer = StepPacker(
            device,
            block_size=BLOCK_SIZE,
            largest=BatchSizes(MAX_SEQS, MAX_ROWS, MAX_SEQS, MAX_ROWS),
            max_blocks=MAX_SEQS * BLOCKS_EACH,
            padding_block=0,
        )
        self.forward = ModelForward(loaded, self.attention, self.lora, self.vocabulary, compiled=compiled)
        self.runner = DeviceRunner(self.packer, inner, self.lora, self.forward, self.sampler, self.vocabulary)
        if self.lora is not None:
            self.lora.inside_rows = graphs.inside_rows
        if graphs.decode:
            rows = graphs.largest.num_logits
            logits = torch.zeros(rows, loaded.vocab_size, dtype=loaded.dtype, device=device)
            self.runner.capture(graphs, logits)

    def teacher_force(self, sequences: Sequence[Running], continuations: Sequence[list[int]], budget: int) -> None:
        """Step until each sequence has all tokens of its continuation, whatever the model would rather say."""
        rest = {sequence.request_id: list(tokens) for sequence, tokens in zip(sequences, continuations, strict=True)}
        while todo := [s for s in sequences if rest[s.request_id]]:
            result = self.step(todo, budget)
            assert not result.failed, result.failed
            for sequence in todo:
                if sequence.request_id in result.sampled:
                    sequence.token_ids[-1] = rest[sequence.request_id].pop(0)


def slots_by_order(monkeypatch: pytest.MonkeyPatch) -> dict[LoRAOrder, set[int]]:
    """By order of kernels, the slots of the adapters that steps are run with in it from now on."""
    seen: dict[LoRAOrder, set[int]] = {order: set() for order in LoRAOrder}
    choose = TableLoRA.order

    def noting(lora: TableLoRA, row_slots: Int32Array) -> LoRAOrder:
        order = choose(lora, row_slots)
        seen[order].update(row_slots[row_slots >= 0].tolist())
        return order

    monkeypatch.setattr(TableLoRA, "order", noting)
    return seen


def table_lora(loaded: LoadedModel, adapters: Mapping[int, AdapterWeights]) -> tuple[TableLoRA, VocabularyStep]:
    """The adapters in an arena, each in its slot, as the GPU tier would put them there."""
    head_bias = None if loaded.head is None else loaded.base_weights.bias(loaded.head.paths[0])
    modules = TableModules(loaded.groups, loaded.head, head_bias)
    arranged = {slot: modules.arranged(weights) for slot, weights in adapters.items()}
    layouts = {slot: lay_out({i: shape_of(module) for i, module in each.items()}) for slot, each in arranged.items()}
    arena = Arena(sum(layout.num_elements for layout in layouts.values()), dtype=loaded.dtype, device=loaded.device)
    tables = AdapterTables(modules.count, max(adapters) + 1, device=loaded.device)
    writer = ArenaWriter(arena, tables, buffer_bytes=1 << 16)
    vocabulary = {}
    for slot, layout in layouts.items():
        runs = (Run(0, layout.num_elements, arena.allocate(layout.num_elements)),)
        writer.write(slot, arranged[slot], layout, runs)
        tables.slot_rank[slot] = largest_rank(arranged[slot])
        tables.slot_affine[slot] = is_affine(arranged[slot].values())
        found = slot_vocabulary(modules, layout, runs, arena)
        if found is not None:
            vocabulary[slot] = found
    bind_tables(loaded.model, modules, tables)
    lora = TableLoRA(tables, arena, max_rows=MAX_ROWS, max_rank=256, beside=True)
    step = VocabularyStep(lora, tables, arena, modules, vocabulary, max_rows=MAX_ROWS, max_segments=MAX_SEQS + 2)
    return lora, step
