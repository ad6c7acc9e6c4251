"""Reference counts and the order of reuse."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from punica_core.kv.block_pool import BlockPool


def test_an_allocated_block_is_not_given_out_again() -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate(2) + pool.allocate(2)) == [0, 1, 2, 3]
    assert pool.num_free == 0


def test_a_shared_block_is_free_only_after_its_last_release() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.retain(table)
    pool.release(table)
    assert pool.num_free == 1
    pool.release(table)
    assert pool.num_free == 2


def test_blocks_without_content_are_reused_before_cached_ones() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    pool.mark_cached(table[0])
    pool.release(table)
    assert pool.allocate(2) == [table[1], table[2]]


def test_cached_blocks_are_reused_least_recently_released_first_and_tail_before_head() -> None:
    pool = BlockPool(4)
    evicted: list[int] = []
    pool.on_evict(evicted.append)
    old, new = pool.allocate(2), pool.allocate(2)
    for block_id in old + new:
        pool.mark_cached(block_id)
    pool.release(old)
    pool.release(new)
    pool.allocate(4)
    assert evicted == [old[1], old[0], new[1], new[0]]


def test_a_retained_cached_block_is_not_evicted() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.mark_cached(table[0])
    pool.release(table)
    pool.retain(table)
    assert pool.allocate(1) != table
    assert pool.num_free == 0


def test_more_blocks_than_are_free_cannot_be_allocated() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)


def test_a_second_release_is_noticed() -> None:
    pool = BlockPool(1)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(table)


def test_a_free_block_without_content_cannot_be_shared() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="no content to share"):
        pool.retain([0])


def test_check_notices_a_block_that_is_free_and_in_use() -> None:
    pool = BlockPool(2)
    pool.check()
    pool._references[1] = 1
    with pytest.raises(AssertionError, match="block 1"):
        pool.check()


class BlockPoolMachine(RuleBasedStateMachine):
    """Against a model that knows every table and what is cached."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.pool.on_evict(self._evicted)
        self.tables: list[list[int]] = []
        self.cached: set[int] = set()

    def _evicted(self, block_id: int) -> None:
        assert block_id in self.cached, "content that was not findable cannot be evicted"
        assert not any(block_id in table for table in self.tables), "content in use was evicted"
        self.cached.remove(block_id)

    @rule(count=st.integers(0, 3))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            return
        plain = {block for block in range(6) if self.pool.is_free(block)} - self.cached
        table = self.pool.allocate(count)
        assert set(table) & self.cached == set(), "an evicted block is still called cached"
        assert plain <= set(table) or set(table) <= plain, "cached blocks went before plain ones"
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.retain(table)
        self.tables.append(list(table))

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted({block for table in self.tables for block in table})))
        self.pool.mark_cached(block_id)
        self.cached.add(block_id)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def revive(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.cached)))
        self.pool.retain([block_id])
        self.tables.append([block_id])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check()
        in_use = {block for table in self.tables for block in table}
        assert self.pool.num_free == 6 - len(in_use)
        assert self.pool.num_cached == len(self.cached)
        for block in range(6):
            assert self.pool.references(block) == sum(table.count(block) for table in self.tables)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
