"""What is found again, and above all what is not."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from punica_core.kv.block_pool import BlockPool
from punica_core.kv.prefix_cache import PrefixCache

SIZE = 4
PROMPT = list(range(100, 113))  # three full blocks and one token


def filled(num_blocks: int = 8) -> tuple[BlockPool, PrefixCache, list[int]]:
    """A cache that knows PROMPT for adapter "a" of tenant "t"; its blocks are still in use."""
    pool = BlockPool(num_blocks)
    cache = PrefixCache(pool, SIZE)
    table = pool.allocate(4)
    cache.publish(cache.chain("a", "t"), PROMPT, len(PROMPT), table)
    return pool, cache, table


def test_an_equal_prefix_is_found() -> None:
    _pool, cache, table = filled()
    match = cache.match("a", "t", [*PROMPT, 7, 8])
    assert (match.block_ids, match.num_tokens) == (tuple(table[:3]), 12)


def test_a_prefix_that_differs_in_its_first_block_is_not_found() -> None:
    _pool, cache, _table = filled()
    assert cache.match("a", "t", [0, *PROMPT[1:]]).num_tokens == 0


def test_a_match_ends_where_the_tokens_differ() -> None:
    _pool, cache, table = filled()
    assert cache.match("a", "t", [*PROMPT[:5], 0, *PROMPT[6:]]).block_ids == (table[0],)


def test_the_same_tokens_in_another_block_position_are_not_found() -> None:
    _pool, cache, _table = filled()
    assert cache.match("a", "t", PROMPT[4:]).num_tokens == 0


@pytest.mark.parametrize(
    ("adapter_key", "tenant"), [("b", "t"), ("", "t"), ("a", "u"), ("a", ""), ("at", ""), ("", "at"), ("t", "a")]
)
def test_another_adapter_or_tenant_finds_nothing(adapter_key: str, tenant: str) -> None:
    _pool, cache, _table = filled()
    assert cache.match(adapter_key, tenant, PROMPT).num_tokens == 0


def test_the_last_token_is_left_to_compute() -> None:
    _pool, cache, table = filled()
    assert cache.match("a", "t", PROMPT[:12]).block_ids == tuple(table[:2])
    assert cache.match("a", "t", PROMPT[:4]).num_tokens == 0


def test_a_block_that_is_not_full_is_not_published() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool, SIZE)
    cache.publish(cache.chain("a", "t"), PROMPT, 7, pool.allocate(4))
    assert cache.match("a", "t", PROMPT).num_tokens == 4


def test_publishing_goes_on_where_it_stopped() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool, SIZE)
    table, chain = pool.allocate(4), cache.chain("a", "t")
    for num_computed in range(len(PROMPT) + 1):
        cache.publish(chain, PROMPT, num_computed, table)
        assert cache.match("a", "t", PROMPT).num_tokens == num_computed // SIZE * SIZE


def test_released_blocks_stay_findable_until_they_are_reused() -> None:
    pool, cache, table = filled(num_blocks=4)
    pool.release(table)
    assert cache.match("a", "t", PROMPT).num_tokens == 12
    pool.allocate(2)
    assert cache.match("a", "t", PROMPT).block_ids == tuple(table[:2])


def test_content_that_two_blocks_hold_is_found_in_the_first() -> None:
    pool, cache, table = filled()
    twin = pool.allocate(4)
    cache.publish(cache.chain("a", "t"), PROMPT, len(PROMPT), twin)
    assert cache.match("a", "t", PROMPT).block_ids == tuple(table[:3])


def test_a_twin_takes_over_when_the_first_block_was_evicted() -> None:
    pool, cache, table = filled(num_blocks=8)
    twin, chain = pool.allocate(4), cache.chain("a", "t")
    cache.publish(chain, PROMPT, 12, twin)
    pool.release(table)
    pool.allocate(4)
    assert cache.match("a", "t", PROMPT).num_tokens == 0
    cache.publish(chain, [*PROMPT, 1, 2, 3], 16, twin)
    assert cache.match("a", "t", [*PROMPT, 1, 2, 3, 4]).block_ids == tuple(twin)
    cache.check()


def test_a_chain_does_not_continue_under_a_reused_block() -> None:
    """A child is found through its parent's content, not through the id of the block that held it."""
    pool, cache, table = filled(num_blocks=4)
    pool.release(table)
    stranger = pool.allocate(2)
    other = list(range(8))
    cache.publish(cache.chain("a", "t"), other, 8, stranger)
    assert cache.match("a", "t", [*other, *PROMPT[8:]]).num_tokens == 8
    cache.check()


def test_withdrawn_blocks_are_not_found_and_what_follows_them_neither() -> None:
    pool, cache, table = filled()
    cache.withdraw(table[1:2])
    assert cache.match("a", "t", PROMPT).block_ids == (table[0],)
    cache.check()
    pool.release(table)
    pool.check()


def test_check_notices_a_block_in_the_index_that_the_pool_reused() -> None:
    pool, cache, table = filled()
    pool._cached.discard(table[0])
    with pytest.raises(AssertionError, match="disagree"):
        cache.check()


def test_evicting_everything_leaves_no_branch_behind() -> None:
    pool, cache, table = filled(num_blocks=4)
    pool.release(table)
    pool.allocate(4)
    assert not cache._root.children


class PrefixCacheMachine(RuleBasedStateMachine):
    """Sequences over two letters, so that prefixes meet; a model knows the content of every block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.cache = PrefixCache(self.pool, 2)
        self.content: dict[int, tuple[object, ...]] = {}
        self.sequences: list[tuple[str, str, list[int], list[int]]] = []

    @rule(
        key=st.sampled_from(["", "a", "ab"]),
        tenant=st.sampled_from(["", "b"]),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=7),
    )
    def start(self, key: str, tenant: str, tokens: list[int]) -> None:
        match = self.cache.match(key, tenant, tokens)
        assert match.num_tokens == 2 * len(match.block_ids) < len(tokens)
        for index, block_id in enumerate(match.block_ids):
            assert self.content[block_id] == (key, tenant, tokens[: 2 * index + 2]), "foreign content was found"
        revived = sum(map(self.pool.is_free, match.block_ids))
        missing = -(-len(tokens) // 2) - len(match.block_ids)
        if missing + revived > self.pool.num_free:
            return
        self.pool.retain(match.block_ids)
        table = [*match.block_ids, *self.pool.allocate(missing)]
        for index in range(len(match.block_ids), len(table)):
            self.content[table[index]] = (key, tenant, tokens[: 2 * index + 2])
        self.cache.publish(self.cache.chain(key, tenant), tokens, len(tokens), table)
        self.sequences.append((key, tenant, tokens, table))
        longest = max(0, (len(tokens) - 1) // 2)
        assert self.cache.match(key, tenant, tokens).num_tokens == 2 * longest, "what was published is not found"

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        *_rest, table = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.release(table)

    @invariant()
    def consistent(self) -> None:
        self.pool.check()
        self.cache.check()


TestPrefixCacheMachine = PrefixCacheMachine.TestCase
TestPrefixCacheMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
