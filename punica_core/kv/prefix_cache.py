"""Reuse of KV blocks between sequences that start alike.

The KV of a token depends on the adapter and on every token before it, so a block is found only through the whole
chain: (adapter_key, tenant), then the token ids of each block from the first one on. The chain is a trie whose edges
are those values themselves, compared by equality: there is no digest that could collide and no string that could be
forged, and one tenant's prompts never meet another's.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from punica_core.config import BLOCK_SIZE
from punica_core.kv.block_pool import BlockPool


@dataclass(slots=True, eq=False)
class _Node:
    """One full block of tokens after its parent's. `block_id` is None when no block holds that content now, which
    happens to the root, to (adapter, tenant) nodes, and to an evicted block that still has children."""

    parent: _Node | None
    edge: Hashable
    block_id: int | None = None
    children: dict[Hashable, _Node] = field(default_factory=dict)
    detached: bool = False


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix of some tokens: `block_ids` hold the KV of the first `num_tokens`."""

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0


@dataclass(slots=True, eq=False)
class PrefixChain:
    """How far the blocks of one sequence have been published. Made by `PrefixCache.chain`, opaque to its holder."""

    adapter_key: str
    tenant: str
    node: _Node
    num_blocks: int = 0


class PrefixCache:
    """Index from token prefixes to the blocks of `pool` that hold their KV. Only full blocks are in it.

    The index holds no references: a block is findable from `publish` until the pool reuses it or it is withdrawn.
    """

    def __init__(self, pool: BlockPool, block_size: int = BLOCK_SIZE) -> None:
        self.block_size = block_size
        self._pool = pool
        self._root = _Node(None, None)
        self._nodes: dict[int, _Node] = {}
        pool.on_evict(self._forget)

    def match(self, adapter_key: str, tenant: str, token_ids: Sequence[int]) -> PrefixMatch:
        """The longest prefix of `token_ids` in the index, at least one token short of all of them.

        The last token is always left to compute, since its logits are needed. Changes nothing: to use the blocks,
        `retain` them in the pool before anything is allocated.
        """
        size = self.block_size
        node = self._root.children.get((adapter_key, tenant))
        block_ids: list[int] = []
        for start in range(0, len(token_ids) - size, size):
            node = node and node.children.get(tuple(token_ids[start : start + size]))
            if node is None or node.block_id is None:
                break
            block_ids.append(node.block_id)
        return PrefixMatch(tuple(block_ids), len(block_ids) * size)

    def chain(self, adapter_key: str, tenant: str) -> PrefixChain:
        """A handle for publishing the blocks of one sequence."""
        return PrefixChain(adapter_key, tenant, self._root)

    def publish(
        self, chain: PrefixChain, token_ids: Sequence[int], num_computed: int, block_table: Sequence[int]
    ) -> None:
        """Make findable the full blocks among the first `num_computed` tokens that `chain` has not published yet.

        The blocks must be in use. Content that another block already holds stays with that block.
        """
        size = self.block_size
        num_full = num_computed // size
        if num_full <= chain.num_blocks:
            return
        if chain.node.detached or chain.num_blocks == 0:
            chain.node, chain.num_blocks = self._child(self._root, (chain.adapter_key, chain.tenant)), 0
        for index in range(chain.num_blocks, num_full):
            node = self._child(chain.node, tuple(token_ids[index * size : (index + 1) * size]))
            block_id = block_table[index]
            if node.block_id is None:
                assert block_id not in self._nodes, f"block {block_id} is already found by other tokens"
                node.block_id = block_id
                self._nodes[block_id] = node
                self._pool.mark_cached(block_id)
            chain.node = node
        chain.num_blocks = num_full

    def withdraw(self, block_ids: Sequence[int]) -> None:
        """Make blocks that are in use unfindable: their content turned out to be unusable."""
        for block_id in block_ids:
            if block_id in self._nodes:
                self._forget(block_id)
                self._pool.unmark_cached(block_id)

    def check(self) -> None:
        """Assert the invariants: index and trie agree, no dead branches, every indexed block is the pool's."""
        seen: set[int] = set()
        stack = [self._root]
        while stack:
            node = stack.pop()
            assert not node.detached
            assert node is self._root or node.children or node.block_id is not None, "a dead branch was kept"
            if node.block_id is not None:
                assert self._nodes[node.block_id] is node
                seen.add(node.block_id)
            for edge, child in node.children.items():
                assert child.parent is node
                assert child.edge == edge
                stack.append(child)
        assert seen == set(self._nodes), "the index knows blocks that the trie does not"
        assert len(seen) == self._pool.num_cached, "the pool and the index disagree on what is cached"

    @staticmethod
    def _child(parent: _Node, edge: Hashable) -> _Node:
        child = parent.children.get(edge)
        if child is None:
            child = parent.children[edge] = _Node(parent, edge)
        return child

    def _forget(self, block_id: int) -> None:
        node = self._nodes.pop(block_id)
        node.block_id = None
        while node.parent is not None and node.block_id is None and not node.children:
            del node.parent.children[node.edge]
            node.detached = True
            node = node.parent
