"""Which sequences, and how many tokens of each, make the next iteration: one rule is one object behind ``Batching``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

from services.scheduler.core.sequence import Sequence, Status

if TYPE_CHECKING:
    from services.scheduler.core.queue import RequestQueue

__all__ = ["BatchLimits", "Batching", "IterationBatching", "Share"]


class Share(NamedTuple):
    """What one sequence has of an iteration."""

    sequence: Sequence
    num_tokens: int


class Batching(Protocol):
    """Selects iterations from the queue."""

    def select(self, queue: RequestQueue) -> list[Share]:
        """Select the next iteration; sequences that it starts or preempts have been moved in the queue."""
        ...

    def keeps(self, sequence: Sequence) -> bool:
        """Whether a sequence that has had its last token keeps its place, and all it has, until ``take_released``."""
        ...

    def take_released(self) -> list[Sequence]:
        """Sequences that were kept and may go now."""
        ...


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of one iteration."""

    max_batch_size: int
    """Sequences."""
    max_batch_tokens: int | None
    """Token budget; None is ORCA's own rule, where a prompt is always computed whole."""
    num_stages: int
    run_ahead: int = 0
    """Iterations of a sequence in flight beyond the first."""
    split_over_stages: bool = True
    """With fewer sequences than the pipeline could take, give every stage its part."""


class _Budget:
    """Tokens left of an iteration's budget."""

    def __init__(self, max_tokens: int | None) -> None:
        self.left = sys.maxsize if max_tokens is None else max_tokens

    def spend(self, num_tokens: int) -> int:
        """Take up to ``num_tokens`` and return how many there were."""
        spent = min(num_tokens, self.left)
        self.left -= spent
        return spent


class IterationBatching:
    """Iteration-level scheduling (ORCA, Algorithm 1), with a token budget where there is one (Sarathi-Serve).

    Of the sequences that may run, in order of arrival, up to ``max_batch_size`` are selected; then those that wait are
    started until one does not fit. Every decode has its one token first; what is left of the budget goes to prompts in
    order of arrival. An earlier request has therefore run at least as many iterations as a later one, unless it has
    finished.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits

    def select(self, queue: RequestQueue) -> list[Share]:
        """Select the next iteration."""
        cap = self._batch_cap(queue)
        runnable = islice(filter(self._may_run, queue.started.values()), cap)
        candidates = [(sequence, sequence.num_uncomputed_tokens) for sequence in runnable]
        budget = _Budget(self._limits.max_batch_tokens)
        budget.spend(sum(num_tokens == 1 for _, num_tokens in candidates))
        num_preemptions = queue.num_preemptions
        batch: list[Share] = []
        for sequence, num_uncomputed in candidates:
            if sequence.status is Status.WAITING:
                break  # preempted to make room for an earlier one, and so are all that follow
            num_tokens = budget.spend(num_uncomputed) if num_uncomputed > 1 else num_uncomputed
            if num_tokens and queue.make_room(sequence, num_tokens):
                batch.append(Share(sequence, num_tokens))
        # Whoever was preempted just now must not come back at once.
        if queue.num_preemptions == num_preemptions:
            while len(batch) < cap and budget.left and (admitted := queue.admit_next()) is not None:
                batch.append(Share(admitted, budget.spend(admitted.num_uncomputed_tokens)))
        return batch

    def _may_run(self, sequence: Sequence) -> bool:
        if sequence.status is Status.READY:
            return True
        # Running ahead: its tokens in flight are not known here, but the worker has them. Never past max_tokens.
        return (
            sequence.num_in_flight <= self._limits.run_ahead
            and sequence.num_output_tokens + sequence.num_pending_tokens < sequence.max_tokens
        )

    def _batch_cap(self, queue: RequestQueue) -> int:
        """Sequences in this iteration at most.

        A batch of all sequences would leave every stage but one idle: with fewer than fill the pipeline, each of its
        ``num_stages`` iterations gets an equal part of them.
        """
        limits = self._limits
        if limits.num_stages == 1 or not limits.split_over_stages:
            return limits.max_batch_size
        num_runnable = len(queue.started) + (len(queue.waiting) if queue.can_admit_next() else 0)
        return max(1, min(limits.max_batch_size, -(-num_runnable // limits.num_stages)))

    def keeps(self, sequence: Sequence) -> bool:
        """No: early finishers leave at once."""
        del sequence
        return False

    def take_released(self) -> list[Sequence]:
        """Nobody was kept."""
        return []
