"""Which KV blocks are in use: reference counts and the order in which free blocks are reused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class BlockPool:
    """Owner of the block ids 0 … num_blocks - 1.

    A block is in use while its reference count is positive, else it is free. A free block may still be *cached*:
    its content is findable through an index (see `PrefixCache`) until the block is reused. Reuse takes blocks
    without findable content first, then cached ones, least recently released first.

    Misuse (allocating more than `num_free`, releasing a free block) is our own bug and fails an assertion.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a pool needs at least one block")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: set[int] = set()
        self._on_evict: Callable[[int], None] | None = None

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now; cached free ones count."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks with findable content, in use or free."""
        return len(self._cached)

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def is_free(self, block_id: int) -> bool:
        return block_id in self._free

    def on_evict(self, listener: Callable[[int], None]) -> None:
        """Call `listener(block_id)` just before the content of a cached block is lost. One listener at most."""
        assert self._on_evict is None, "a pool has one index"
        self._on_evict = listener

    def mark_cached(self, block_id: int) -> None:
        """The content of this block, which is in use, is findable from now on."""
        assert self._references[block_id] > 0, f"block {block_id} is free"
        self._cached.add(block_id)

    def unmark_cached(self, block_id: int) -> None:
        """The content of this block, which is in use, is no longer findable."""
        assert self._references[block_id] > 0, f"block {block_id} is free"
        self._cached.discard(block_id)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference. Their old content is lost."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        block_ids = []
        for _ in range(count):
            block_id, _none = self._free.popitem(last=False)
            if block_id in self._cached:
                self._cached.remove(block_id)
                if self._on_evict is not None:
                    self._on_evict(block_id)
            self._references[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def retain(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each block; a free cached block comes back into use with its content."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                assert block_id in self._cached, f"block {block_id} is free and has no content to share"
                del self._free[block_id]
            self._references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block of a sequence's table.

        The end of the table is freed first, thus reused first: a prefix outlives what continues it.
        """
        for block_id in reversed(block_ids):
            assert self._references[block_id] > 0, f"block {block_id} was released twice"
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free[block_id] = None
                if block_id not in self._cached:
                    self._free.move_to_end(block_id, last=False)

    def check(self) -> None:
        """Assert the invariants: free is exactly unreferenced, counts are sane, ids are in range."""
        for block_id, references in enumerate(self._references):
            assert references >= 0, f"block {block_id} has {references} references"
            assert (references == 0) == (block_id in self._free), f"block {block_id}: {references} references"
        assert len(self._free) <= self.num_blocks
        assert all(0 <= block_id < self.num_blocks for block_id in self._cached)
