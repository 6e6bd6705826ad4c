"""The request pool: who waits and who has started, both in order of arrival.

Everybody who has started arrived before everybody who waits: admission takes the first that waits, and preemption puts
the last that started back in front of them.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile
from typing import TYPE_CHECKING

from services.scheduler.core.sequence import RequestKey, Sequence, Status

if TYPE_CHECKING:
    from services.scheduler.core.kv_policy import KvPolicy
    from services.scheduler.core.plan import RowTable

__all__ = ["RequestQueue"]


class RequestQueue:
    """All unfinished sequences. It moves them; blocks and rows move with them."""

    def __init__(self) -> None:
        self.started: OrderedDict[RequestKey, Sequence] = OrderedDict()
        self.waiting: OrderedDict[RequestKey, Sequence] = OrderedDict()
        self.num_preemptions = 0
        self._kv: KvPolicy | None = None
        self._rows: RowTable | None = None

    def attach(self, kv: KvPolicy, rows: RowTable) -> None:
        """Begin a new engine: nobody has started in it."""
        assert not self.started
        self._kv = kv
        self._rows = rows

    def __len__(self) -> int:
        return len(self.started) + len(self.waiting)

    @property
    def num_preempted(self) -> int:
        """How many of those that wait have started before; they are the first."""
        return sum(1 for _ in takewhile(lambda sequence: sequence.scheduled_ns is not None, self.waiting.values()))

    def get(self, key: RequestKey) -> Sequence | None:
        """The sequence of a request, if it is here."""
        return self.started.get(key) or self.waiting.get(key)

    def sequences(self) -> list[Sequence]:
        """All, in order of arrival."""
        return [*self.started.values(), *self.waiting.values()]

    def add(self, sequence: Sequence) -> None:
        """Let a newcomer wait."""
        self.waiting[sequence.key] = sequence

    def next_waiting(self) -> Sequence | None:
        """The first that waits."""
        return next(iter(self.waiting.values()), None)

    def can_admit_next(self) -> bool:
        """Whether the first that waits could start now."""
        sequence = self.next_waiting()
        return sequence is not None and self._policy.can_admit(sequence, len(self.started))

    def admit_next(self) -> Sequence | None:
        """Start the first that waits; None where nobody waits or its K/V is not to be had: stop, not skip."""
        sequence = self.next_waiting()
        if sequence is None or not self._policy.admit(sequence, len(self.started)):
            return None
        del self.waiting[sequence.key]
        self.started[sequence.key] = sequence
        sequence.move_to(Status.READY)
        return sequence

    def make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a started sequence slots for its next tokens, preempting the latest arrivals while the pool is dry.

        False: it was the latest itself and has been preempted.
        """
        while not self._policy.grow(sequence, num_tokens):
            victim = next(reversed(self.started.values()))
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Put the last that started back to waiting; its tokens are computed again later (recomputation).

        It may be in flight: workers run plans in order, so its blocks are safe to reuse, and its result is void.
        """
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._put_back(sequence)

    def put_all_back(self) -> None:
        """The engine is gone: everybody waits again, in the old order."""
        for sequence in reversed(self.started.values()):
            sequence.move_to(Status.WAITING)
            sequence.forget_engine()
            self.waiting[sequence.key] = sequence
            self.waiting.move_to_end(sequence.key, last=False)
        self.started.clear()

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out and give back all it has."""
        self.started.pop(sequence.key, None)
        self.waiting.pop(sequence.key, None)
        self._give_back(sequence)

    def _put_back(self, sequence: Sequence) -> None:
        del self.started[sequence.key]
        sequence.move_to(Status.WAITING)
        self._give_back(sequence)
        self.waiting[sequence.key] = sequence
        self.waiting.move_to_end(sequence.key, last=False)

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.block_ids:
            self._policy.release(sequence)
        if sequence.row is not None and self._rows is not None:
            self._rows.release(sequence.row)
        sequence.forget_engine()

    @property
    def _policy(self) -> KvPolicy:
        assert self._kv is not None
        return self._kv
