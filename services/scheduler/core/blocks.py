"""K/V blocks by number: which are free, and how many a sequence needs. It does not know who owns the others."""

from __future__ import annotations

from shared.ids import BlockId

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
        # A stack: the block freed last is taken first, while it may still be in a cache.
        self._free = [BlockId(block) for block in range(num_blocks - 1, -1, -1)]

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    @property
    def num_slots(self) -> int:
        """Slots of the whole pool (``n_slots`` of Algorithm 1)."""
        return self.num_blocks * self.block_size

    @property
    def num_used_slots(self) -> int:
        """Slots in blocks that are taken (``n_rsrv`` of Algorithm 1, in whole blocks)."""
        return (self.num_blocks - len(self._free)) * self.block_size

    @property
    def free_ids(self) -> frozenset[BlockId]:
        """Numbers of the free blocks, for checks."""
        return frozenset(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def take(self, count: int) -> list[BlockId] | None:
        """Take ``count`` blocks, or none at all where fewer are free."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        return taken

    def give_back(self, block_ids: list[BlockId]) -> None:
        """Return blocks. Giving one back twice would be a bug of the caller; ``check_invariants`` finds it."""
        self._free.extend(reversed(block_ids))
