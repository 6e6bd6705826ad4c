"""Request-level scheduling, as FasterTransformer with a plain front does it: the baseline that ORCA is compared with.

ORCA §3.1 (C1), §6: a batch is taken from the queue when the engine is idle and stays as it is until its last member
ends. Early finishers go on being computed and cannot return; whoever arrives waits for the whole batch. All prompts are
treated as having the length of the shortest: that much is computed in the first iteration, the rest of longer prompts
token by token. Over several stages the batch is split into micro-batches. It is never the default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.batching import Share
from services.scheduler.core.sequence import Sequence, Status

if TYPE_CHECKING:
    from services.scheduler.core.batching import BatchLimits
    from services.scheduler.core.queue import RequestQueue

__all__ = ["RequestBatching"]


class RequestBatching:
    """One fixed batch after the other."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._micro_batches: list[list[Sequence]] = []
        self._next = 0
        self._first_tokens = 0
        self._kept: list[Sequence] = []

    def select(self, queue: RequestQueue) -> list[Share]:
        """The next micro-batch of the batch that is there, or the first of a new one."""
        if not self._micro_batches:
            self._form_batch(queue)
        for _ in range(len(self._micro_batches)):
            micro_batch = self._micro_batches[self._next]
            if any(sequence.num_in_flight for sequence in micro_batch):
                return []  # micro-batches take turns, in order
            self._next = (self._next + 1) % len(self._micro_batches)
            shares = self._shares(micro_batch)
            if shares:
                return shares
        return []

    def _form_batch(self, queue: RequestQueue) -> None:
        batch: list[Sequence] = []
        while len(batch) < self._limits.max_batch_size and (sequence := queue.admit_next()) is not None:
            batch.append(sequence)
        if not batch:
            return
        self._first_tokens = min(sequence.num_uncomputed_tokens for sequence in batch)
        size = -(-len(batch) // self._limits.num_stages)
        self._micro_batches = [batch[start : start + size] for start in range(0, len(batch), size)]
        self._next = 0

    def _shares(self, micro_batch: list[Sequence]) -> list[Share]:
        shares = []
        for sequence in micro_batch:
            if sequence.status is Status.READY:
                first = sequence.num_iterations == 0
                shares.append(Share(sequence, self._first_tokens if first else 1))
            elif sequence in self._kept and sequence.block_ids:
                # It has ended, but its place in the batch is computed all the same: the last token, again and again.
                sequence.num_computed_tokens = min(sequence.num_computed_tokens, len(sequence.token_ids) - 1)
                shares.append(Share(sequence, 1))
        return shares if any(share.sequence.status is Status.READY for share in shares) else []

    def keeps(self, sequence: Sequence) -> bool:
        """Yes: nobody leaves before the last of the batch has ended, unless cancelled."""
        self._kept.append(sequence)
        return True

    def take_released(self) -> list[Sequence]:
        """All of the batch, once its last member has ended."""
        if any(
            sequence.status in {Status.READY, Status.RUNNING} for batch in self._micro_batches for sequence in batch
        ):
            return []
        self._micro_batches.clear()
        # Who was cancelled after its last token has left already.
        kept, self._kept = [sequence for sequence in self._kept if sequence.block_ids], []
        return kept
