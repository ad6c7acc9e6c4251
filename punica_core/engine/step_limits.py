"""What no step of a GPU exceeds, padding included, and what the buffers for such steps take."""

from __future__ import annotations

from dataclasses import dataclass

from punica_core.config import BLOCK_SIZE, EngineConfig
from punica_core.engine.step_batch import MIN_ROWS, BatchSizes, packer_bytes
from punica_core.lora.segments import plan_bytes
from punica_core.ops.layout import row_pitch


@dataclass(frozen=True, slots=True)
class StepLimits:
    """max_blocks: KV blocks of all sequences of a step together. max_segments: runs of rows with one adapter among
    those that need logits. max_rank: bound of every lora_rank."""

    largest: BatchSizes
    max_rows: int
    max_blocks: int
    max_segments: int
    max_rank: int

    @classmethod
    def of(cls, config: EngineConfig, captured: BatchSizes, max_model_len: int) -> StepLimits:
        """captured: the sizes that no captured step exceeds."""
        budget = config.max_num_batched_tokens
        max_seqs = max(config.max_num_seqs, captured.num_decode, MIN_ROWS)
        largest = BatchSizes(
            num_decode=max_seqs,
            num_prompt_rows=max(budget, captured.num_prompt_rows),
            num_prompts=max(config.max_num_seqs, captured.num_prompts),
            num_prompt_logits=max(budget, captured.num_prompt_logits),
        )
        return cls(
            largest,
            max_rows=max(budget, captured.num_rows, MIN_ROWS),
            max_blocks=max_seqs * -(-max_model_len // BLOCK_SIZE) + max_seqs,
            max_segments=config.max_num_seqs + 2,  # rows that pad those of decode steps and prompts are of the base
            max_rank=config.max_lora_rank,
        )

    def device_bytes(self, *, lora: bool) -> int:
        """Of the buffers that describe a step: its tables, and with adapters the plans of its rows and its logits."""
        plans = (self.max_rows, self.max_segments) if lora else ()
        rank = row_pitch(self.max_rank)
        return packer_bytes(self.largest, self.max_blocks) + sum(
            plan_bytes(self.max_rows, rank, max_segments) for max_segments in plans
        )
