"""Who gets K/V blocks, and when: one policy is one object behind ``KvPolicy``.

A policy and the pool are the only ones that move blocks. What a sequence has is in ``Sequence.block_ids``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from services.scheduler.core.prefixes import EMPTY_PREFIX, Prefix

if TYPE_CHECKING:
    from services.scheduler.core.blocks import BlockPool
    from services.scheduler.core.sequence import Sequence

__all__ = ["KvPolicy", "PagedPolicy", "ReservePolicy"]


class KvPolicy(Protocol):
    """Gives blocks to sequences and takes them back."""

    def can_admit(self, sequence: Sequence, num_started: int) -> bool:
        """Whether ``admit`` would succeed now; ``num_started`` sequences have blocks already."""
        ...

    def admit(self, sequence: Sequence, num_started: int) -> bool:
        """Give a waiting sequence what it needs to start, or leave everything as it was.

        Where its beginning is in the prefix cache, it starts with those tokens computed.
        """
        ...

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a started sequence slots for its next ``num_tokens`` tokens, or leave everything as it was."""
        ...

    def computed(self, sequence: Sequence) -> None:
        """Note that the tokens of a sequence have been scheduled up to ``num_computed_tokens``."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Take back all that a sequence has."""
        ...


class _Blocks(ABC):
    """What the policies share: the pool, and the prefix cache where it is on."""

    def __init__(self, pool: BlockPool, *, prefix_cache: bool) -> None:
        self._pool = pool
        self._prefix_cache = prefix_cache

    @abstractmethod
    def _demand(self, sequence: Sequence, num_started: int) -> tuple[int, int]:
        """What a waiting sequence must get to start: slots, and blocks to leave available beyond them."""

    def can_admit(self, sequence: Sequence, num_started: int) -> bool:
        """Whether the demand can be met now."""
        num_slots, num_spare_blocks = self._demand(sequence, num_started)
        prefix = self._cached_prefix(sequence)
        return self._room_for(prefix, self._num_new_blocks(prefix, num_slots), num_spare_blocks)

    def admit(self, sequence: Sequence, num_started: int) -> bool:
        """Give what is demanded, shared blocks first; all or nothing."""
        num_slots, num_spare_blocks = self._demand(sequence, num_started)
        prefix = self._cached_prefix(sequence)
        num_new = self._num_new_blocks(prefix, num_slots)
        if not self._room_for(prefix, num_new, num_spare_blocks):
            return False
        self._pool.share(prefix.block_ids)
        new_blocks = self._pool.take(num_new)
        assert new_blocks is not None
        sequence.block_ids = prefix.block_ids + new_blocks
        sequence.prefix_name = prefix.name
        sequence.num_registered_blocks = len(prefix.block_ids)
        sequence.num_computed_tokens = len(prefix.block_ids) * self._pool.block_size
        if sequence.scheduled_ns is None:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        return True

    def _cached_prefix(self, sequence: Sequence) -> Prefix:
        """What of the sequence is known. The last token is always computed: a logit comes of it.

        Where the prompt is scored, logits come of all its tokens.
        """
        if not self._prefix_cache or sequence.num_prompt_logprobs is not None:
            return Prefix(EMPTY_PREFIX, [])
        return self._pool.match(sequence.token_ids, (len(sequence.token_ids) - 1) // self._pool.block_size)

    def _num_new_blocks(self, prefix: Prefix, num_slots: int) -> int:
        return self._pool.blocks_for(num_slots) - len(prefix.block_ids)

    def _room_for(self, prefix: Prefix, num_new: int, num_spare_blocks: int) -> bool:
        available = self._pool.num_available - self._pool.num_unowned(prefix.block_ids)
        return num_new + num_spare_blocks <= available

    def computed(self, sequence: Sequence) -> None:
        """Register the blocks that became full, as far as their tokens are known.

        Workers run plans in order, so a block that this iteration fills may be used by the next one.
        """
        if not self._prefix_cache:
            return
        size = self._pool.block_size
        num_full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // size
        while sequence.num_registered_blocks < num_full:
            index = sequence.num_registered_blocks
            content = sequence.token_ids[index * size : (index + 1) * size]
            sequence.prefix_name = self._pool.register(sequence.prefix_name, content, sequence.block_ids[index])
            sequence.num_registered_blocks += 1

    def release(self, sequence: Sequence) -> None:
        """Give all blocks back."""
        self._pool.give_back(sequence.block_ids)
        sequence.block_ids.clear()


class ReservePolicy(_Blocks):
    """ORCA's policy: reserve all slots a request can ever need, at its first schedule (Algorithm 1, lines 13 to 27).

    A request that has started can therefore always go on: no deadlock, no preemption. The price is memory that stays
    unused when outputs are shorter than ``max_tokens``.
    """

    def _demand(self, sequence: Sequence, num_started: int) -> tuple[int, int]:
        del num_started
        return sequence.max_slots, 0

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Nothing to do: everything is reserved."""
        del sequence, num_tokens
        return True


class PagedPolicy(_Blocks):
    """Blocks on demand (PagedAttention, SOSP '23): a sequence has no more than its tokens need.

    When the pool is dry the caller preempts. So that this stays rare, a sequence starts only where its tokens fit and
    every sequence that has started could still take one more block: it will compute ``block_size`` tokens or so before
    it can be preempted, which bounds its preemptions. Alone it always fits, or was refused at the door.
    """

    def _demand(self, sequence: Sequence, num_started: int) -> tuple[int, int]:
        return min(len(sequence.token_ids) + 1, sequence.max_slots), num_started

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take blocks for the next tokens."""
        num_slots = sequence.num_computed_tokens + num_tokens
        num_missing = self._pool.blocks_for(num_slots) - len(sequence.block_ids)
        if num_missing <= 0:
            return True
        blocks = self._pool.take(num_missing)
        if blocks is None:
            return False
        sequence.block_ids += blocks
        return True
