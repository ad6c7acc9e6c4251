"""Executes step plans with torch. Owns the KV cache's memory; takes no decisions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from punica_core.config import BLOCK_SIZE, EngineConfig
from punica_core.engine.step_inputs import LogitsRange, StepInputs, build_inputs, samples_token, scored_prompt_tokens
from punica_core.errors import ConfigError
from punica_core.lora.layers import LoRALinear
from punica_core.lora.linear import FEW_ROWS
from punica_core.lora.segmented import SegmentedLoRA
from punica_core.lora.threads import Threads
from punica_core.lora.weights import AdapterWeights
from punica_core.model.attention import PagedAttention
from punica_core.model.loader import LoadedModel
from punica_core.protocol import TokenLogprobs
from punica_core.scheduler.plan import CompletedStep, RowPlan, SampledToken, StepPlan, StepResult

LORA_LAYOUT_BYTES = 512 * 1024 * 1024
"""Most that the re-laid copies of adapters take that are kept besides those of the running step."""

KV_FRACTION = 0.5
"""Share of the free memory that the KV cache takes when kv_tokens is 0."""

KV_SEQUENCES = 4
"""With kv_tokens 0, no more is taken on a CPU than so many sequences of full length need."""


class Sampler(Protocol):
    """Chooses tokens (see engine.sampler)."""

    def sample(self, logits: Tensor, rows: Sequence[RowPlan]) -> list[SampledToken]:
        """logits: [B, V] fp32, one row of finite numbers for each of `rows`."""

    def prompt_logprobs(self, logits: Tensor, token_ids: list[int], top: int) -> list[TokenLogprobs]:
        """logits: [n, V] fp32; log-probabilities of token_ids [n] and the `top` best alternatives."""


def kv_bytes_per_block(loaded: LoadedModel) -> int:
    return loaded.kv_shape.block_bytes(BLOCK_SIZE, loaded.dtype)


def lora_layout_bytes(config: EngineConfig, adapter_bytes: int) -> int:
    """Bytes set aside for re-laid copies of adapters, of which all adapters together have `adapter_bytes`."""
    return min(LORA_LAYOUT_BYTES, adapter_bytes) if config.lora else 0


def plan_memory(config: EngineConfig, loaded: LoadedModel, free_bytes: int) -> int:
    """Number of KV blocks: of kv_tokens, or of free memory.

    Raises `ConfigError` when not even one sequence of full length fits.
    """
    longest = -(-loaded.max_model_len // BLOCK_SIZE)
    if config.kv_tokens:
        blocks = config.kv_tokens // BLOCK_SIZE
    else:
        blocks = min(int(free_bytes * KV_FRACTION) // kv_bytes_per_block(loaded), KV_SEQUENCES * longest)
    if blocks < longest:
        raise ConfigError(
            f"The KV cache has room for {blocks * BLOCK_SIZE} tokens, but one sequence may have "
            f"{loaded.max_model_len}: raise kv_tokens or lower max_model_len.",
            param="kv_tokens",
        )
    return blocks


def allocate_kv_cache(loaded: LoadedModel, num_blocks: int) -> Tensor:
    """An uninitialised KV cache: [blocks, L, 2, P, K, D]. Attention clears each block when a sequence begins it."""
    shape = loaded.kv_shape
    return torch.empty(
        (num_blocks, shape.num_layers, 2, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim),
        dtype=loaded.dtype,
        device=loaded.device,
    )


def share_threads(model: nn.Module) -> Threads:
    """Let the base products of a model's LoRA-aware linears choose between one thread and all that torch has now."""
    threads = Threads(torch.get_num_threads())
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.product = threads.linear
    return threads


class ModelRunner:
    """Executes plans on one model, each when it is launched: a CPU has nothing to do meanwhile.

    weights_of: the adapter in a slot; asked once per segment and step, kept by its re-laid copy at most.
    layout_bytes: bound on the copies kept besides those of the running step.
    """

    runs_ahead = False

    def __init__(
        self,
        loaded: LoadedModel,
        kv_cache: Tensor,
        weights_of: Callable[[int], AdapterWeights],
        sampler: Sampler,
        layout_bytes: int = LORA_LAYOUT_BYTES,
    ) -> None:
        self._loaded = loaded
        self._kv_cache = kv_cache
        self._weights_of = weights_of
        self._sampler = sampler
        head_bias = None if loaded.head is None else loaded.base_weights.bias(loaded.head.paths[0])
        self._threads = share_threads(loaded.model) if loaded.device.type == "cpu" else None
        self._lora = SegmentedLoRA(loaded.groups, layout_bytes, loaded.device, loaded.head, head_bias)

    def launch(self, plan: StepPlan) -> CompletedStep:
        """Compute the plan's rows now."""
        return CompletedStep(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows. The same plan may be executed again: KV is overwritten with the same values."""
        if not plan.rows:
            return StepResult()
        result = StepResult()
        with torch.inference_mode(), self._threads_for(plan.num_tokens) as threads:
            inputs = build_inputs(plan, self._weights_of, self._loaded.device)
            logits = self._forward(inputs, threads)
            if threads is not None and logits.size(0) > 1:
                threads.use_all()
            usable = _usable(inputs.logits, logits, result)
            self._sample(usable, logits, result)
            self._score_prompts(usable, logits, result)
        return result

    @contextlib.contextmanager
    def _threads_for(self, num_tokens: int) -> Iterator[Threads | None]:
        """Run a step of few rows on one thread but for what is worth all; None if it is not one of those."""
        threads = self._threads
        if threads is None or num_tokens > FEW_ROWS:
            yield None
            return
        threads.use_one()
        try:
            yield threads
        finally:
            threads.use_all()

    def _forward(self, inputs: StepInputs, threads: Threads | None) -> Tensor:
        """Logits [n, V] fp32 of the rows that need them."""
        loaded = self._loaded
        loaded.lora.step = self._lora.step(inputs.segments)
        loaded.head_lora.step = self._lora.head_step(inputs.logit_segments)
        loaded.embedding_lora.step = self._lora.embedding_step(inputs.segments)
        try:
            paged = PagedAttention(self._kv_cache, inputs.kv_rows, threads)
            if loaded.lean is not None:
                logits = loaded.lean(inputs.input_ids, inputs.position_ids, inputs.logit_rows, paged)
            else:
                logits = loaded.model(
                    input_ids=inputs.input_ids,
                    position_ids=inputs.position_ids,
                    use_cache=False,
                    logits_to_keep=inputs.logit_rows,
                    paged=paged,
                ).logits[0]
        finally:
            loaded.lora.step = loaded.head_lora.step = loaded.embedding_lora.step = None
        return logits.float()

    def _sample(self, ranges: Sequence[LogitsRange], logits: Tensor, result: StepResult) -> None:
        sampling = [part for part in ranges if samples_token(part.row)]
        if not sampling:
            return
        chosen = logits if len(sampling) == logits.size(0) else logits[[part.last for part in sampling]]
        tokens = self._sampler.sample(chosen, [part.row for part in sampling])
        for part, token in zip(sampling, tokens, strict=True):
            result.sampled[part.row.sequence.request_id] = token

    def _score_prompts(self, ranges: Sequence[LogitsRange], logits: Tensor, result: StepResult) -> None:
        for part in ranges:
            token_ids = scored_prompt_tokens(part.row)
            if token_ids:
                scores = logits[part.first : part.first + len(token_ids)]
                top = part.row.sequence.sampling.prompt_logprobs or 0
                result.prompt_logprobs[part.row.sequence.request_id] = self._sampler.prompt_logprobs(
                    scores, token_ids, top
                )


def _usable(ranges: Sequence[LogitsRange], logits: Tensor, result: StepResult) -> list[LogitsRange]:
    """The rows whose logits are all finite; the others go to `result.failed`."""
    if bool(torch.isfinite(logits.sum(-1)).all()):
        return list(ranges)
    finite = torch.isfinite(logits).all(-1)
    usable = []
    for part in ranges:
        if bool(finite[part.first : part.first + part.count].all()):
            usable.append(part)
        else:
            result.failed[part.row.sequence.request_id] = (
                "The model's output has values that are NaN or infinite. "
                + (f"Adapter {part.row.sequence.adapter_key[:12]} overflows." if part.row.sequence.adapter_key else "")
            ).strip()
    return usable
