"""What a scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the scheduler was made.

    decode_tokens: tokens computed by steps of one token behind the prompt; prefill_tokens: all others, recomputed
    ones included. prefix_query_tokens and prefix_hit_tokens: prompt tokens looked up and found, once a sequence.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0

    def count_row(self, start: int, count: int, num_prompt: int) -> None:
        """Tokens [start, start + count) of a sequence were computed."""
        if start >= num_prompt and count == 1:
            self.decode_tokens += 1
        else:
            self.prefill_tokens += count

    def count_lookup(self, query_tokens: int, hit_tokens: int) -> None:
        """A prompt was looked up in the prefix cache."""
        self.prefix_query_tokens += query_tokens
        self.prefix_hit_tokens += hit_tokens
