"""Executes step plans on a GPU without waiting for it: a step is packed, planned and queued while the last one runs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from punica_core.engine.forward import ModelForward
from punica_core.engine.graphs import GraphKey, GraphSizes, StepGraphs
from punica_core.engine.step_batch import BatchSizes, StepBatch, StepPacker, exact_sizes, split_rows
from punica_core.engine.step_inputs import LogitsRange, samples_token, scored_prompt_tokens
from punica_core.engine.transfers import Mark, upload
from punica_core.lora.table_step import LoRAOrder, TableLoRA
from punica_core.lora.vocabulary_step import VocabularyStep
from punica_core.model.attention_op import AttentionBatch
from punica_core.ops.linear import FEW_LINEAR_ROWS
from punica_core.protocol import TokenLogprobs
from punica_core.scheduler.pacing import StepSizes
from punica_core.scheduler.plan import RowPlan, SampledToken, StepPlan, StepResult

logger = logging.getLogger(__name__)


class StepAttentionPlanner(Protocol):
    """What is told of a step before its layers compute attention."""

    def wants_cut(self, batch: AttentionBatch) -> bool:
        """Whether the contexts of a step's decode rows should be cut in pieces."""

    def begin(self, batch: AttentionBatch, cut: bool = True) -> None:
        """Prepare for the step, without waiting for the device. cut: contexts of decode rows may be cut in pieces."""


class PendingSamples(Protocol):
    """Tokens being sampled."""

    @property
    def token_ids(self) -> Tensor:
        """int64 [B] on the device."""

    def result(self) -> list[SampledToken | None]:
        """Waits for the device. None for a row whose logits are not all finite (-inf is)."""


class DeviceSampler(Protocol):
    """Chooses tokens without waiting for the device (see engine.device_sampler)."""

    def launch(self, logits: Tensor, rows: Sequence[RowPlan]) -> PendingSamples:
        """logits: [B, V], one row for each of `rows`; read before the current stream's later work."""

    def prompt_logprobs(self, logits: Tensor, token_ids: list[int], top: int) -> list[TokenLogprobs]:
        """logits: [n, V] fp32; log-probabilities of token_ids [n] and the `top` best alternatives. Waits."""


class DeviceRunner:
    """Implements `engine.Runner`. graphs: captured steps, None while every step is computed eagerly.

    vocabulary: for steps whose adapters change embedding or head. They are computed eagerly; others do not know of it.
    """

    runs_ahead = True

    def __init__(
        self,
        packer: StepPacker,
        attention: StepAttentionPlanner,
        lora: TableLoRA | None,
        forward: ModelForward,
        sampler: DeviceSampler,
        vocabulary: VocabularyStep | None = None,
    ) -> None:
        self._packer = packer
        self._attention = attention
        self._lora = lora
        self._forward = forward
        self._sampler = sampler
        self._vocabulary = vocabulary
        self._sampled_at: dict[int, int] = {}
        self.graphs: StepGraphs | None = None

    @property
    def step_sizes(self) -> StepSizes:
        """What steps are padded to."""
        return StepSizes() if self.graphs is None else self.graphs.sizes.step_sizes()

    def launch(self, plan: StepPlan) -> PendingDeviceStep:
        """Queue the plan's rows. Raises for faults that are not one row's own."""
        with torch.inference_mode():
            batch, logits = self._compute(plan.rows)
            sampling = [part for part in batch.logits if samples_token(part.row)]
            samples = self._sample(sampling, logits)
        scored = [part for part in batch.logits if scored_prompt_tokens(part.row)]
        return PendingDeviceStep(
            Mark(logits.device), self._sampler, sampling, samples, scored, logits if scored else None
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows and wait for them."""
        return self.launch(plan).result() if plan.rows else StepResult()

    def warm_up(self, num_rows: int, order: LoRAOrder) -> None:
        """Run a step of `num_rows` padding rows of one sequence, as a prompt would be run: compiles what it needs."""
        with torch.inference_mode():
            self._run(self._packer.pack_padding(num_rows), order)

    def capture(
        self, sizes: GraphSizes, logits: Tensor, on_progress: Callable[[float], None] = lambda share: None
    ) -> None:
        """Capture steps of the given sizes. logits: [most rows of logits, V], the graphs' output.

        The KV cache, the tables and the arena must be those that will serve. on_progress: told the share that is done.
        """
        graphs = StepGraphs(sizes, logits)
        steps = sizes.steps()
        with torch.inference_mode():
            for done, step in enumerate(steps):
                on_progress(done / len(steps))
                batch = self._packer.pack((), (), {}, step, in_graph=True)
                for key in sizes.keys(step, lora=self._lora is not None):
                    if self._lora is not None and not self._lora.can_run(key.order, step.num_rows):
                        continue
                    self._begin(batch, key.cut, key.order)
                    self._capture(graphs, key, functools.partial(self._forward, batch, key.order))
        self.graphs = graphs

    def _capture(self, graphs: StepGraphs, key: GraphKey, run: Callable[[], Tensor]) -> None:
        """Capture one step. What makes that fail is given up for all steps if they can do without it: shrink beside the
        base product, or else the step's order."""
        lora = self._lora
        error = _failure(graphs, key, run)
        # Some layers run shrink beside the base product in the orders AHEAD and INSIDE, too.
        if error is not None and lora is not None and lora.beside and key.order is not LoRAOrder.NONE:
            lora.beside = False
            first, error = error, _failure(graphs, key, run)
            if error is None:
                logger.warning("shrink does not run beside the base product, as capturing that failed: %s", first)
            else:
                lora.beside = True
        if error is None:
            return
        if lora is None or key.order in (LoRAOrder.BESIDE, LoRAOrder.NONE):
            raise error
        what = key.order.name
        if key.order is LoRAOrder.INSIDE and key.sizes.num_rows > FEW_LINEAR_ROWS:
            lora.inside_rows = FEW_LINEAR_ROWS
            what += f" in steps of more than {FEW_LINEAR_ROWS} rows"
        else:
            lora.dropped.add(key.order)
        logger.warning("LoRA is never computed in the order %s, as capturing that failed: %s", what, error)

    def _compute(self, rows: Sequence[RowPlan]) -> tuple[StepBatch, Tensor]:
        """The packed step, and its logits [at least n, V] in the model's dtype."""
        decode, prompts = split_rows(rows)
        with_vocabulary = self._vocabulary is not None and self._vocabulary.concerns(row.slot for row in rows)
        captured = None if with_vocabulary else self._captured_sizes(decode, prompts)
        sizes = exact_sizes(decode, prompts) if captured is None else captured
        batch = self._packer.pack(decode, prompts, self._sampled_at, sizes, in_graph=captured is not None)
        order = LoRAOrder.NONE if self._lora is None else self._lora.order(batch.row_slots)
        if captured is None or self.graphs is None:
            return batch, self._run(batch, order, with_vocabulary)
        cut = False not in self.graphs.sizes.cuts(captured, order) or self._attention.wants_cut(batch.attention)
        self._begin(batch, cut, order)
        return batch, self.graphs.replay(GraphKey(captured, order, cut))

    def _captured_sizes(self, decode: Sequence[RowPlan], prompts: Sequence[RowPlan]) -> BatchSizes | None:
        """The captured step that these rows can be padded to, if there is one."""
        # Logits that are read after the launch must not lie where the next graph puts its own.
        if self.graphs is None or any(map(scored_prompt_tokens, (*decode, *prompts))):
            return None
        return self.graphs.sizes.fit(len(decode), sum(row.count for row in prompts), len(prompts))

    def _run(self, batch: StepBatch, order: LoRAOrder, with_vocabulary: bool = False) -> Tensor:
        self._begin(batch, self._attention.wants_cut(batch.attention), order)
        if with_vocabulary and self._vocabulary is not None:
            self._vocabulary.begin(batch.row_slots, batch.logit_slots())
        return self._forward(batch, order, with_vocabulary=with_vocabulary)

    def _begin(self, batch: StepBatch, cut: bool, order: LoRAOrder) -> None:
        self._attention.begin(batch.attention, cut)
        if self._lora is not None:
            self._lora.begin(batch.row_slots, order)

    def _sample(self, sampling: Sequence[LogitsRange], logits: Tensor) -> PendingSamples | None:
        """Queue the sampling of the rows' next tokens, and keep these where the next step's rows find them."""
        self._sampled_at = {part.row.sequence.request_id: index for index, part in enumerate(sampling)}
        if not sampling:
            return None
        wanted = [part.last for part in sampling]
        if wanted == list(range(len(wanted))):
            chosen = logits[: len(wanted)]
        else:
            (index,) = upload([np.array(wanted, np.int64)], logits.device)
            chosen = logits.index_select(0, index)
        samples = self._sampler.launch(chosen, [part.row for part in sampling])
        self._packer.last_tokens[: len(wanted)].copy_(samples.token_ids)
        return samples


@dataclass(frozen=True, slots=True)
class PendingDeviceStep:
    """A step that was queued. `result` waits for it, also if nothing comes of it: until then its sequences keep their
    adapters, whose memory others may be copied to afterwards.

    end: of all that was queued for it.
    """

    end: Mark
    sampler: DeviceSampler
    sampling: Sequence[LogitsRange]
    samples: PendingSamples | None
    scored: Sequence[LogitsRange]
    logits: Tensor | None

    def result(self) -> StepResult:
        """See `StepResult`. Raises what the device reported."""
        self.end.wait()
        result = StepResult()
        if self.samples is not None:
            for part, token in zip(self.sampling, self.samples.result(), strict=True):
                request_id = part.row.sequence.request_id
                if token is None:
                    result.failed[request_id] = not_finite(part.row)
                else:
                    result.sampled[request_id] = token
        for part in self.scored:
            self._score(part, result)
        return result

    def _score(self, part: LogitsRange, result: StepResult) -> None:
        assert self.logits is not None
        request_id, token_ids = part.row.sequence.request_id, scored_prompt_tokens(part.row)
        if request_id in result.failed:
            return
        with torch.inference_mode():
            scores = self.logits[part.first : part.first + len(token_ids)].float()
            if not bool(torch.isfinite(scores.sum(-1)).all()):
                result.failed[request_id] = not_finite(part.row)
                result.sampled.pop(request_id, None)
                return
            top = part.row.sequence.sampling.prompt_logprobs or 0
            result.prompt_logprobs[request_id] = self.sampler.prompt_logprobs(scores, token_ids, top)


def _failure(graphs: StepGraphs, key: GraphKey, run: Callable[[], Tensor]) -> RuntimeError | None:
    """Why a step could not be captured; None if it was. Raises for want of memory."""
    try:
        graphs.capture(key, run)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return error
    return None


def not_finite(row: RowPlan) -> str:
    """The message for a row whose logits are NaN or infinite."""
    key = row.sequence.adapter_key
    culprit = f" Adapter {key[:12]} overflows." if key else ""
    return f"The model's output has values that are NaN or infinite.{culprit}"
