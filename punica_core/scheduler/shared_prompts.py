"""Equal beginnings of prompts that are about to be computed twice."""

from __future__ import annotations

from punica_core.scheduler.sequence import Sequence, Status


class SharedPrompts:
    """Knows the running sequences whose prompts are being computed for the prefix cache.

    A sequence that would compute the same tokens beside one of them rather waits until it finds them in the cache, if
    these are at least half of what it has to compute: all but one of a request's choices do, and requests that share
    most of their prompt. Less is not worth the steps it would wait.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._computing: dict[tuple[str, str], list[Sequence]] = {}

    def begin(self, sequence: Sequence) -> None:
        """The sequence runs, and the blocks of its prompt will be published as they are computed."""
        key = (sequence.adapter_key, sequence.tenant)
        others = [other for other in self._computing.get(key, ()) if _computes(other, other.num_prompt)]
        self._computing[key] = [*others, sequence]

    def forget_computed(self) -> None:
        """Drop what is not being computed any more."""
        for key, sequences in list(self._computing.items()):
            if not any(_computes(sequence, sequence.num_prompt) for sequence in sequences):
                del self._computing[key]

    def is_awaited(self, sequence: Sequence, only_for_older: bool) -> bool:
        """Whether `should_wait` was true and what it was about is still being computed."""
        if sequence.follows is None:
            return False
        leader, num_tokens = sequence.follows
        if not _computes(leader, num_tokens):
            sequence.follows = None
        return sequence.follows is not None and not (only_for_older and leader.serial > sequence.serial)

    def should_wait(self, sequence: Sequence, num_found: int, only_for_older: bool) -> bool:
        """Whether another sequence computes at least half of what this one would have to, of whose tokens the first
        `num_found` are in the cache. It has its adapter, or has none. only_for_older: one that arrived later does not
        count."""
        half_way = (num_found + sequence.num_tokens + 1) // 2
        num_shared = -(-half_way // self._block_size) * self._block_size
        if num_shared >= sequence.num_tokens:
            return False
        beginning = sequence.token_ids[:num_shared]
        for leader in self._computing.get((sequence.adapter_key, sequence.tenant), ()):
            if only_for_older and leader.serial > sequence.serial:
                continue
            if _computes(leader, num_shared) and leader.token_ids[:num_shared] == beginning:
                sequence.follows = leader, num_shared
                return True
        return False


def _computes(sequence: Sequence, num_tokens: int) -> bool:
    """Whether it runs, and its first `num_tokens` tokens are those of its prompt and not all computed yet."""
    return sequence.status is Status.RUNNING and sequence.num_computed < num_tokens <= sequence.num_prompt
