"""The bounds a scheduler works within."""

from __future__ import annotations

from dataclasses import dataclass

from punica_core.config import BLOCK_SIZE, EngineConfig, EngineLayout

SCORED_LOGITS_BYTES = 256 * 1024 * 1024
"""Most memory that the logits of scored prompt tokens take in one step, in fp32."""

FAIRNESS_SECONDS = 1.0
"""Default of `overtake_limit` and `adapter_wait_limit`."""


def max_scored_tokens(vocab_size: int) -> int:
    """Prompt tokens of a step whose logits take no more than `SCORED_LOGITS_BYTES`, at least one."""
    return max(1, SCORED_LOGITS_BYTES // (4 * vocab_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """max_num_seqs: most running sequences. max_num_batched_tokens: token budget of one step.
    max_scored_tokens: most of them whose logprobs are asked for as part of a prompt: each needs logits.
    max_model_len: longest sequence (prompt + output) in tokens.
    eos_token_ids: end a sequence unless it asked for `ignore_eos`.
    overtake_limit: seconds after its arrival from which nothing overtakes a waiting sequence of the same tenant.
    adapter_wait_limit: seconds that a sequence waits for room for its adapter before others make way for it.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_scored_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    block_size: int = BLOCK_SIZE
    overtake_limit: float = FAIRNESS_SECONDS
    adapter_wait_limit: float = FAIRNESS_SECONDS

    def __post_init__(self) -> None:
        assert self.max_scored_tokens > 0, "prompts could never be scored"
        if self.max_num_batched_tokens < self.max_num_seqs or self.max_num_seqs < 1:
            raise ValueError(
                f"max_num_seqs is {self.max_num_seqs} and max_num_batched_tokens {self.max_num_batched_tokens}; every "
                "running sequence needs at least one token a step"
            )

    def blocks_for(self, num_tokens: int) -> int:
        """KV blocks that so many tokens need."""
        return -(-num_tokens // self.block_size)

    @classmethod
    def of(cls, config: EngineConfig, layout: EngineLayout) -> SchedulerLimits:
        return cls(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=layout.max_model_len,
            max_scored_tokens=max_scored_tokens(layout.vocab_size),
            eos_token_ids=frozenset(layout.eos_token_ids),
            block_size=layout.block_size,
        )
