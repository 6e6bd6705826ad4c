"""What blocks hold: chains of full blocks, found again by their token ids. Knows no owner and no pool.

A prefix has a name, a number that is never used twice. A block's key is (name of the prefix before it, its token ids),
and the dictionary compares whole keys: two prefixes are never taken for one another, whatever their hashes. One pool
serves one model, so the model need not be part of the key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, NewType

if TYPE_CHECKING:
    from shared.ids import BlockId
    from shared.messages import TokenIds

__all__ = ["EMPTY_PREFIX", "ContentIndex", "Prefix", "PrefixName"]

PrefixName = NewType("PrefixName", int)

EMPTY_PREFIX = PrefixName(0)
"""Name of the prefix without a token."""


class Prefix(NamedTuple):
    """The beginning of a sequence, in blocks."""

    name: PrefixName
    block_ids: list[BlockId]


class ContentIndex:
    """Blocks by content."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[PrefixName, bytes], tuple[PrefixName, BlockId]] = {}
        self._key_of: dict[BlockId, tuple[PrefixName, bytes]] = {}
        self._next_name = EMPTY_PREFIX + 1

    def __contains__(self, block: BlockId) -> bool:
        return block in self._key_of

    def match(self, token_ids: TokenIds, block_size: int, max_blocks: int) -> Prefix:
        """The longest known chain that begins ``token_ids``, up to ``max_blocks``."""
        name, found = EMPTY_PREFIX, []
        for start in range(0, max_blocks * block_size, block_size):
            entry = self._by_key.get((name, token_ids[start : start + block_size].tobytes()))
            if entry is None:
                break
            name, block = entry
            found.append(block)
        return Prefix(name, found)

    def register(self, parent: PrefixName, content: bytes, block: BlockId) -> PrefixName:
        """Name the prefix that ``content`` makes of ``parent``; a block that holds it already stays."""
        key = (parent, content)
        entry = self._by_key.get(key)
        if entry is None:
            entry = (PrefixName(self._next_name), block)
            self._next_name += 1
            self._by_key[key] = entry
            self._key_of[block] = key
        return entry[0]

    def forget(self, block: BlockId) -> None:
        """Drop a block's content; the blocks that follow it cannot be found any more."""
        del self._by_key[self._key_of.pop(block)]
