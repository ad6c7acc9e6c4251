"""The base model's forward pass over a packed step, compiled: norms, rotary embedding and activation fused.

One function of fixed signature serves prompts and decode steps, with and without adapters. Attention and LoRA are
opaque ops in it. Compiled code depends on neither the number of rows nor on the step's mix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from punica_core.engine.step_batch import StepBatch
from punica_core.lora.table_step import TableLoRA
from punica_core.model.attention_op import OpAttention
from punica_core.model.loader import LoadedModel

Forward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class ModelForward:
    """Calls the model on a step. compiled: through torch.compile, else as transformers wrote it.

    last_tokens: int64 [max_seqs], what the step before has sampled.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        attention: OpAttention,
        lora: TableLoRA | None,
        last_tokens: Tensor,
        *,
        compiled: bool,
    ) -> None:
        self._loaded = loaded
        self._lora = lora
        self._last_tokens = last_tokens
        forward = _forward_of(loaded.model, attention)
        self._forward: Forward = torch.compile(forward, fullgraph=True, dynamic=True) if compiled else forward

    def __call__(self, batch: StepBatch, *, with_lora: bool) -> Tensor:
        """Logits [n, V] of the batch's `logit_rows`, in the model's dtype. The attention and LoRA of it were begun."""
        assert self._lora is not None or not with_lora, (
            "the step has adapters and there is nothing to compute them with"
        )
        self._loaded.lora.step = self._lora if with_lora else None
        try:
            return self._forward(batch.token_ids, batch.sources, self._last_tokens, batch.positions, batch.logit_rows)
        finally:
            self._loaded.lora.step = None


def _forward_of(model: Any, attention: OpAttention) -> Forward:
    def forward(
        token_ids: Tensor, sources: Tensor, last_tokens: Tensor, positions: Tensor, logit_rows: Tensor
    ) -> Tensor:
        tokens = torch.where(sources >= 0, last_tokens[sources.clamp(min=0)], token_ids)
        output = model(
            input_ids=tokens[None],
            position_ids=positions[None].long(),
            use_cache=False,
            logits_to_keep=logit_rows.long(),
            paged=attention,
        )
        logits: Tensor = output.logits[0]
        return logits

    return forward
