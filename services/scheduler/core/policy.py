"""Who gets K/V blocks, and when: one policy is one object behind ``KvPolicy``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from services.scheduler.core.blocks import BlockPool
    from services.scheduler.core.sequence import Sequence

__all__ = ["KvPolicy", "ReservePolicy"]


class KvPolicy(Protocol):
    """Gives blocks to sequences and takes them back; the only caller of the pool's ``take`` and ``give_back``."""

    def fits(self, max_slots: int) -> bool:
        """Whether a sequence of so many tokens can ever run, alone on an empty pool."""
        ...

    def admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence what it needs to start; False leaves everything as it was."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Take back all that a sequence has."""
        ...


class ReservePolicy:
    """ORCA's policy: reserve all slots a request can ever need, at its first schedule (Algorithm 1, lines 13 to 27).

    A request that has started can therefore always go on: no deadlock, no preemption. The price is memory that stays
    unused when outputs are shorter than ``max_tokens``.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def fits(self, max_slots: int) -> bool:
        """Whether the whole pool holds so many tokens."""
        return self._pool.blocks_for(max_slots) <= self._pool.num_blocks

    def admit(self, sequence: Sequence) -> bool:
        """Reserve blocks for prompt and ``max_tokens``, all or nothing."""
        blocks = self._pool.take(self._pool.blocks_for(sequence.max_slots))
        if blocks is None:
            return False
        sequence.block_ids.extend(blocks)
        return True

    def release(self, sequence: Sequence) -> None:
        """Return the reservation."""
        self._pool.give_back(sequence.block_ids)
        sequence.block_ids.clear()
