"""A `DeviceRunner` driven by hand, on any device: the parts that a GPU step goes through, attention aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from punica_core.config import BLOCK_SIZE
from punica_core.engine.device_runner import DeviceRunner
from punica_core.engine.forward import ModelForward
from punica_core.engine.graphs import GraphSizes
from punica_core.engine.step_batch import BatchSizes, StepPacker
from punica_core.lora.table_step import TableLoRA, bind_tables
from punica_core.lora.tables import AdapterTables, Arena, num_module_elements
from punica_core.lora.weights import AdapterWeights
from punica_core.model.attention_op import GatheredAttention, OpAttention
from punica_core.model.flashinfer import FlashInferAttention
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

    flashinfer: attention as it is served on a GPU, else in plain torch. graphs: steps to capture.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        adapters: Mapping[int, AdapterWeights] | None = None,
        *,
        compiled: bool = False,
        flashinfer: bool = False,
        graphs: GraphSizes = NO_GRAPHS,
    ) -> None:
        super().__init__(base, adapters)
        loaded, device = self.loaded, self.loaded.device
        self.lora = table_lora(self.loaded, self.adapters)
        self.sampler = GreedySampler()
        specs = loaded.attention_specs
        if flashinfer:
            inner: Any = FlashInferAttention(
                self.kv_cache, loaded.num_heads, specs, MAX_SEQS, max_prompt_rows=MAX_ROWS, max_prompts=MAX_SEQS
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
        self.forward = ModelForward(loaded, self.attention, self.lora, compiled=compiled)
        self.runner = DeviceRunner(self.packer, inner, self.lora, self.forward, self.sampler)
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


def table_lora(loaded, adapters: Mapping[int, AdapterWeights]) -> TableLoRA | None:  # type: ignore[no-untyped-def]
    """The adapters in an arena, each in its slot."""
    if not adapters:
        return None
    paths = [path for group in loaded.groups for path in group.paths]
    modules = {
        slot: {paths.index(path): module for path, module in weights.modules.items()}
        for slot, weights in adapters.items()
    }
    size = sum(num_module_elements(module) for each in modules.values() for module in each.values())
    arena = Arena(size, dtype=loaded.dtype, device=loaded.device)
    tables = AdapterTables(len(paths), max(adapters) + 1, device=loaded.device)
    for slot, each in modules.items():
        tables.write(slot, each, arena)
    bind_tables(loaded.model, loaded.groups, tables)
    return TableLoRA(tables, arena, max_rows=MAX_ROWS, max_rank=256)
