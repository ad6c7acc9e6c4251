"""The bounds a scheduler works within."""

from __future__ import annotations

from dataclasses import dataclass

from punica_core.config import BLOCK_SIZE, EngineConfig, EngineLayout

FAIRNESS_SECONDS = 1.0
"""Default of `overtake_limit` and `adapter_wait_limit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """max_num_seqs: most running sequences. max_num_batched_tokens: token budget of one step.
    max_model_len: longest sequence (prompt + output) in tokens.
    eos_token_ids: end a sequence unless it asked for `ignore_eos`.
    overtake_limit: seconds after its arrival from which nothing overtakes a waiting sequence of the same tenant.
    adapter_wait_limit: seconds that a sequence waits for room for its adapter before others make way for it.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    block_size: int = BLOCK_SIZE
    overtake_limit: float = FAIRNESS_SECONDS
    adapter_wait_limit: float = FAIRNESS_SECONDS

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs or self.max_num_seqs < 1:
            raise ValueError(
                f"max_num_seqs is {self.max_num_seqs} and max_num_batched_tokens {self.max_num_batched_tokens}; every "
                "running sequence needs at least one token a step"
            )

    @classmethod
    def of(cls, config: EngineConfig, layout: EngineLayout) -> SchedulerLimits:
        return cls(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=layout.max_model_len,
            eos_token_ids=frozenset(layout.eos_token_ids),
            block_size=layout.block_size,
        )
