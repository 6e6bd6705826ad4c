"""K/V blocks by number: which are free, which are shared, and which still hold something worth finding again.

::

               take                    give_back (last owner)
    free ─────────────▶ owned (1..n) ─────────────────────────▶ free
      ▲                   ▲      │ give_back of a registered block
      │ evicted by take   │share ▼
      └───────────────── cached (no owner, content known, least recently used first)

A block belongs to one sequence or, when it is full and its content is registered with the prefix cache, to several.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from services.scheduler.core.prefixes import ContentIndex, Prefix, PrefixName
from shared.ids import BlockId

if TYPE_CHECKING:
    from collections.abc import Sequence as AnySequence

    from shared.messages import TokenIds

__all__ = ["BlockPool"]


class BlockPool:
    """``num_blocks`` physical blocks of ``block_size`` slots, one slot for the K and V of one token in all layers.

    Every rank has the same blocks under the same numbers, each for its own layers and heads, so that one block table
    serves them all.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks: num_blocks={num_blocks}, block_size={block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: the block freed last is taken first, while it may still be in a processor's cache.
        self._free = [BlockId(block) for block in range(num_blocks - 1, -1, -1)]
        self._num_owners = [0] * num_blocks
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._content = ContentIndex()

    @property
    def num_available(self) -> int:
        """Blocks that can be taken: free ones, and cached ones that nobody owns."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody owns but whose content could be found again."""
        return len(self._cached)

    @property
    def num_slots(self) -> int:
        """Slots of the whole pool (``n_slots`` of Algorithm 1)."""
        return self.num_blocks * self.block_size

    @property
    def num_used_slots(self) -> int:
        """Slots in blocks that somebody owns (``n_rsrv`` of Algorithm 1, in whole blocks)."""
        return (self.num_blocks - self.num_available) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def take(self, count: int) -> list[BlockId] | None:
        """Take ``count`` blocks of undefined content, or none at all where fewer are available."""
        if count > self.num_available:
            return None
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._content.forget(block)
            self._num_owners[block] = 1
            taken.append(block)
        return taken

    def give_back(self, block_ids: AnySequence[BlockId]) -> None:
        """Drop one owner's claim to its blocks, given in the order of its tokens.

        The last ones become the first to be evicted: a prefix is worth more than what follows it.
        """
        for block in reversed(block_ids):
            self._num_owners[block] -= 1
            if self._num_owners[block] > 0:
                continue
            if block in self._content:
                self._cached[block] = None
            else:
                self._free.append(block)

    # --- prefix cache -------------------------------------------------------------------------------------------------

    def match(self, token_ids: TokenIds, max_blocks: int) -> Prefix:
        """Find the longest chain of full blocks that begin ``token_ids``, up to ``max_blocks``.

        Nothing is claimed by it; ``share`` does that.
        """
        return self._content.match(token_ids, self.block_size, max_blocks)

    def share(self, block_ids: AnySequence[BlockId]) -> None:
        """Become one more owner of matched blocks."""
        for block in block_ids:
            if self._num_owners[block] == 0:
                del self._cached[block]
            self._num_owners[block] += 1

    def num_unowned(self, block_ids: AnySequence[BlockId]) -> int:
        """How many of these blocks have no owner: sharing them makes so many fewer available."""
        return sum(1 for block in block_ids if self._num_owners[block] == 0)

    def register(self, parent: PrefixName, token_ids: TokenIds, block: BlockId) -> PrefixName:
        """Make a full block findable that follows the prefix ``parent``; returns the name of the longer prefix."""
        return self._content.register(parent, token_ids.tobytes(), block)

    # --- for checks ---------------------------------------------------------------------------------------------------

    def check(self, owned: dict[BlockId, int]) -> None:
        """Raise ``AssertionError`` unless the pool agrees with ``owned``, the number of owners by block."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is free and cached"
        assert not (free | cached) & owned.keys(), "a block is owned and available"
        assert len(free) + len(cached) + len(owned) == self.num_blocks, "a block is lost"
        for block, count in enumerate(self._num_owners):
            expected = owned.get(BlockId(block), 0)
            assert count == expected, f"block {block} has {count} owners, not {expected}"
        assert all(block in self._content for block in cached), "a cached block has no content"
        assert not any(block in self._content for block in free), "a free block has content"
