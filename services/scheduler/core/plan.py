"""From a batch to a control message: what each worker does not know yet, and nothing else."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from shared.ids import Row
from shared.messages import NewSequence, StepPlan

if TYPE_CHECKING:
    from services.scheduler.core.sequence import Sequence
    from shared.ids import BlockId, Epoch, StepId

__all__ = ["PlanBuilder", "RowTable"]


class RowTable:
    """Rows of the workers' sequence tables: the lowest free one is given out, so the tables stay dense."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._size = 0
        self._released: list[Row] = []

    @property
    def num_taken(self) -> int:
        """Rows in use."""
        return self._size - len(self._free)

    def take(self) -> Row:
        """Give out a row."""
        if self._free:
            return Row(heapq.heappop(self._free))
        self._size += 1
        return Row(self._size - 1)

    def release(self, row: Row) -> None:
        """Free a row; the workers are told with the next plan, before anything in it may use the row again."""
        heapq.heappush(self._free, row)
        self._released.append(row)

    def take_released(self) -> list[Row]:
        """Rows released since the last call."""
        released, self._released = self._released, []
        return released


class PlanBuilder:
    """Builds one ``StepPlan``, column by column, and notes in each sequence what the workers know from then on.

    ``workers_append``: workers append the tokens that they sample to their own tables, so that a plan may leave before
    the tokens of the one before have come back; otherwise the plan brings them.
    """

    def __init__(self, rows: RowTable, *, workers_append: bool) -> None:
        self._rows = rows
        self._workers_append = workers_append
        self._new_sequences: list[NewSequence] = []
        self._row_column: list[Row] = []
        self._num_computed: list[int] = []
        self._num_tokens: list[int] = []
        self._samples: list[bool] = []
        self._num_appended: list[int] = []
        self._appended: list[int] = []
        self._num_new_blocks: list[int] = []
        self._new_blocks: list[BlockId] = []

    def add(self, sequence: Sequence, num_tokens: int) -> bool:
        """Schedule the next ``num_tokens`` tokens of a sequence; returns whether it samples one after them."""
        if sequence.row is None:
            self._introduce(sequence)
        assert sequence.row is not None
        appended = sequence.token_ids[sequence.num_known_tokens :]
        new_blocks = sequence.block_ids[sequence.num_known_blocks :]
        samples = num_tokens == sequence.num_uncomputed_tokens
        self._row_column.append(sequence.row)
        self._num_computed.append(sequence.num_computed_tokens)
        self._num_tokens.append(num_tokens)
        self._samples.append(samples)
        self._num_appended.append(len(appended))
        self._appended.extend(appended)
        self._num_new_blocks.append(len(new_blocks))
        self._new_blocks.extend(new_blocks)
        sequence.num_known_tokens += len(appended) + (samples and self._workers_append)
        sequence.num_known_blocks += len(new_blocks)
        sequence.num_computed_tokens += num_tokens
        sequence.num_pending_tokens += samples
        sequence.num_in_flight += 1
        return samples

    def _introduce(self, sequence: Sequence) -> None:
        sequence.row = self._rows.take()
        sequence.num_known_tokens = len(sequence.token_ids)
        self._new_sequences.append(
            NewSequence(
                row=sequence.row,
                request_id=sequence.request_id,
                token_ids=sequence.token_ids[:],
                num_prompt_tokens=sequence.num_prompt_tokens,
                sampling=sequence.sampling,
                stop_token_ids=sequence.stop_token_ids,
                num_prompt_logprobs=sequence.num_prompt_logprobs,
                grammar=sequence.grammar,
                traceparent=sequence.traceparent,
            )
        )

    @property
    def samples(self) -> list[bool]:
        """Which sequences of the batch sample a token."""
        return self._samples

    @property
    def total_tokens(self) -> int:
        """Tokens of the iteration."""
        return sum(self._num_tokens)

    def build(self, epoch: Epoch, step_id: StepId) -> StepPlan:
        """Return the finished control message."""
        return StepPlan(
            epoch=epoch,
            step_id=step_id,
            rows=self._row_column,
            num_computed_tokens=self._num_computed,
            num_tokens=self._num_tokens,
            samples=self._samples,
            num_appended_tokens=self._num_appended,
            appended_token_ids=self._appended,
            num_new_blocks=self._num_new_blocks,
            new_block_ids=self._new_blocks,
            new_sequences=self._new_sequences,
            released_rows=self._rows.take_released(),
        )
