"""What a worker knows of the sequences in the pool: their tokens, block tables and sampling parameters, row by row.

A control message is a diff to this table (ORCA §4.1); every rank applies the same diffs in the same order, so that all
tables agree. NumPy arrays only: no torch, no I/O, no clock. Which row, block or token belongs to whom is the
scheduler's to decide; this table refuses, with ``ProtocolError``, whatever does not fit what it knows, since nothing
that a caller sends may end in an index error or outside the K/V.

Where workers append the tokens that they sample (run-ahead), a plan arrives before the token that it computes has been
sampled. The table then *reserves* a place for each token that a plan samples: it is counted, so that the next plan
fits, but its value never comes here. Such a token is *late*: whoever computes fills it in.

Arrays double as rows and lengths grow, never beyond ``max_model_len`` tokens a row. Fresh pages cost no memory until
they are written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from shared.errors import ProtocolError
from shared.sampling import MAX_LOGPROBS, sampling_fault

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shared.codec.step_columns import Appended, StepColumns
    from shared.messages import NewSequence

__all__ = ["MAX_ROWS", "Batch", "SequenceTable"]

MAX_ROWS = 1 << 17
"""Rows at most: twice the largest batch that can be configured, far above what a scheduler has in its pool."""

_Scalar = TypeVar("_Scalar", bound=np.generic)

_FIRST_ROWS = 64
_FIRST_TOKENS = 256


class Batch(NamedTuple):
    """The sequences of one iteration, B of them in batch order, at least 1. Nobody writes to it."""

    rows: NDArray[np.int64]
    """[B] rows of the table."""
    num_computed_tokens: NDArray[np.int64]
    """[B] position of each sequence's first token of this iteration."""
    num_tokens: NDArray[np.int64]
    """[B] tokens of each sequence in this iteration, at least 1."""
    context_lens: NDArray[np.int64]
    """[B] tokens of each sequence that are computed once this iteration is: the sum of the two."""
    longest: int
    """The largest of ``context_lens``."""
    samples: NDArray[np.bool_]
    """[B] whether a token is sampled after the last of them."""
    all_sample: bool
    """Whether one is after each of them."""
    is_decode: bool
    """Whether each sequence has one token, as in most iterations by far."""
    num_given_tokens: NDArray[np.int64] | None
    """[B] tokens of each sequence that plans have brought; those from here on are late. None: none is."""


class SequenceTable:
    """Rows of sequences; ``apply`` changes it and says what to compute."""

    def __init__(
        self,
        *,
        max_model_len: int,
        vocab_size: int,
        num_blocks: int,
        block_size: int,
        reserves_sampled: bool = False,
    ) -> None:
        self.block_size = block_size
        self._max_model_len = max_model_len
        self._reserves_sampled = reserves_sampled
        self._vocab_size = vocab_size
        self._num_kv_blocks = num_blocks
        self.token_ids: NDArray[np.int32] = np.zeros((0, 0), np.int32)
        """[rows, tokens]; meaningful up to each row's number of given tokens."""
        self.block_ids: NDArray[np.int32] = np.zeros((0, 0), np.int32)
        """[rows, blocks]; 0 beyond each row's number of blocks."""
        self._is_used = np.zeros(0, np.bool_)
        self.num_given_tokens = np.zeros(0, np.int64)
        """[rows]; tokens that plans have brought. Those from here on are late."""
        self._num_tokens = np.zeros(0, np.int64)
        self._num_blocks = np.zeros(0, np.int64)
        # Sampling parameters, [rows] each.
        self.temperature = np.zeros(0, np.float32)
        self.top_k = np.zeros(0, np.int32)
        self.top_p = np.zeros(0, np.float32)
        self.min_p = np.zeros(0, np.float32)
        self.seed = np.zeros(0, np.uint64)
        self._checked_rows = b""
        """The batch's rows that were last found to be in use and different; a release makes that void."""

    @property
    def num_sequences(self) -> int:
        """Rows in use."""
        return int(self._is_used.sum())

    def apply(self, plan: StepColumns) -> Batch | None:
        """Release, learn, append, reserve, in that order, and return the batch to compute; None if there is none.

        Raises ``ProtocolError`` naming what does not fit; the table is then half changed and of no further use.
        """
        what = f"step {plan.step_id}"
        for row in plan.released_rows:
            self._release(what, row)
        for sequence in plan.new_sequences:
            self._learn(what, sequence)
        if not plan.rows.size:
            return None
        self._check_rows(what, plan.rows)
        if plan.appended_tokens is not None:
            self._append_tokens(what, plan.rows, plan.appended_tokens)
        if plan.new_blocks is not None:
            self._append_blocks(what, plan.rows, plan.new_blocks)
        return self._batch(what, plan)

    def _release(self, what: str, row: int) -> None:
        if not (row < self._is_used.size and self._is_used[row]):
            raise ProtocolError(f"{what} releases row {row}, which holds no sequence")
        self._checked_rows = b""
        self._is_used[row] = False
        self.block_ids[row, : self._num_blocks[row]] = 0
        self._num_blocks[row] = 0
        self._num_tokens[row] = 0

    def _learn(self, what: str, sequence: NewSequence) -> None:
        row, num_tokens = sequence.row, len(sequence.token_ids)
        if row >= MAX_ROWS:
            raise ProtocolError(f"{what} puts a sequence into row {row}; the last row is {MAX_ROWS - 1}")
        if row < self._is_used.size and self._is_used[row]:
            raise ProtocolError(f"{what} puts a sequence into row {row}, which is in use")
        if not 1 <= num_tokens <= self._max_model_len:
            raise ProtocolError(f"{what} has a sequence of {num_tokens} tokens in row {row}; {self._length_limit()}")
        if not 1 <= sequence.num_prompt_tokens <= num_tokens:
            raise ProtocolError(
                f"{what} has a sequence of {num_tokens} tokens in row {row} with a prompt of "
                f"{sequence.num_prompt_tokens}: not between 1 and all of them"
            )
        token_ids = np.frombuffer(sequence.token_ids, np.uint32)
        self._check_tokens(what, token_ids)
        if (fault := sampling_fault(sequence.sampling)) is not None:
            raise ProtocolError(f"{what}, row {row}: {fault}")
        num_logprobs = sequence.num_prompt_logprobs
        if num_logprobs is not None and not 0 <= num_logprobs <= MAX_LOGPROBS:
            raise ProtocolError(f"{what}, row {row}: num_prompt_logprobs cannot be {num_logprobs}")
        self._grow_rows(row + 1)
        self._grow_tokens(num_tokens)
        self._is_used[row] = True
        self.token_ids[row, :num_tokens] = token_ids
        self._num_tokens[row] = self.num_given_tokens[row] = num_tokens
        self.temperature[row] = sequence.sampling.temperature
        self.top_k[row] = min(sequence.sampling.top_k, self._vocab_size)
        self.top_p[row] = sequence.sampling.top_p
        self.min_p[row] = sequence.sampling.min_p
        self.seed[row] = sequence.sampling.seed

    def _append_tokens(self, what: str, rows: NDArray[np.int64], appended: Appended) -> None:
        counts, token_ids = appended
        self._check_tokens(what, token_ids)
        known = self._num_tokens[rows]
        totals = known + counts
        if _largest(totals) > self._max_model_len:
            first = (totals > self._max_model_len).argmax()
            raise ProtocolError(f"{what} makes row {rows[first]} {totals[first]} tokens long; {self._length_limit()}")
        late = (counts > 0) & (self.num_given_tokens[rows] < known)
        if late.any():
            raise ProtocolError(f"{what} brings tokens for row {rows[late][0]}, whose own samples were to come first")
        self._grow_tokens(_largest(totals))
        self.token_ids[_places(rows, known, counts)] = token_ids
        self._num_tokens[rows] = totals
        self.num_given_tokens[rows] += counts

    def _append_blocks(self, what: str, rows: NDArray[np.int64], new: Appended) -> None:
        counts, block_ids = new
        if _largest(block_ids) >= self._num_kv_blocks:
            wrong = block_ids[block_ids >= self._num_kv_blocks][0]
            raise ProtocolError(f"{what} names block {wrong}; this worker has blocks 0 to {self._num_kv_blocks - 1}")
        held = self._num_blocks[rows]
        totals = held + counts
        most = -(-self._max_model_len // self.block_size)
        if _largest(totals) > most:
            first = (totals > most).argmax()
            raise ProtocolError(
                f"{what} gives row {rows[first]} {totals[first]} blocks; {most} hold the longest sequence "
                f"({self._max_model_len} tokens)"
            )
        self._grow_blocks(_largest(totals))
        self.block_ids[_places(rows, held, counts)] = block_ids
        self._num_blocks[rows] = totals

    def _check_rows(self, what: str, rows: NDArray[np.int64]) -> None:
        as_bytes = rows.tobytes()
        if as_bytes == self._checked_rows:  # as long as the same requests are served, the same rows come again
            return
        if _largest(rows) >= self._is_used.size or not self._is_used[rows].all():
            row = next(row for row in rows if row >= self._is_used.size or not self._is_used[row])
            raise ProtocolError(f"{what} computes row {row}, which holds no sequence")
        if len(set(rows.tolist())) != rows.size:
            raise ProtocolError(f"{what} computes a row twice")
        self._checked_rows = as_bytes

    def _batch(self, what: str, plan: StepColumns) -> Batch:
        """Check what is to be computed, count what will be sampled, and return the batch."""
        rows, num_tokens = plan.rows, plan.num_tokens
        if _least(num_tokens) < 1:
            raise ProtocolError(f"{what} computes no token of row {rows[num_tokens.argmin()]}")
        ends = plan.num_computed_tokens + num_tokens
        known = self._num_tokens[rows]
        left = known - ends
        if _least(left) < 0:
            first = (left < 0).argmax()
            raise ProtocolError(
                f"{what} computes row {rows[first]} up to token {ends[first]}, but only {known[first]} are known"
            )
        num_slots = self._num_blocks[rows] * self.block_size
        if _least(num_slots - ends) < 0:
            first = (num_slots < ends).argmax()
            raise ProtocolError(
                f"{what} computes row {rows[first]} up to token {ends[first]}, but its "
                f"{self._num_blocks[rows[first]]} blocks hold {num_slots[first]}"
            )
        is_decode, longest = plan.total_tokens == rows.size, _largest(ends)
        given = None
        if self._reserves_sampled:
            given = self.num_given_tokens[rows]
            reserved = known + plan.samples
            if not is_decode or _largest(left) or longest == self._max_model_len:
                self._check_late(what, plan, known, given)
                reserved = np.minimum(reserved, self._max_model_len)
            self._num_tokens[rows] = reserved
            self._grow_tokens(longest)
        return Batch(
            rows=rows,
            num_computed_tokens=plan.num_computed_tokens,
            num_tokens=num_tokens,
            context_lens=ends,
            longest=longest,
            samples=plan.samples,
            all_sample=bool(plan.samples[plan.samples.argmin()]),
            is_decode=is_decode,
            num_given_tokens=given,
        )

    def _check_late(self, what: str, plan: StepColumns, known: NDArray[np.int64], given: NDArray[np.int64]) -> None:
        """Of the late tokens only the latest can be filled in: an earlier one is refused."""
        first_late = np.maximum(plan.num_computed_tokens, given)
        gone = first_late < np.minimum(plan.num_computed_tokens + plan.num_tokens, known - 1)
        if gone.any():
            raise ProtocolError(
                f"{what} computes token {first_late[gone][0]} of row {plan.rows[gone][0]}, which was sampled here "
                f"and is not kept"
            )

    def _check_tokens(self, what: str, token_ids: NDArray[np.int64] | NDArray[np.uint32]) -> None:
        if _largest(token_ids) >= self._vocab_size:
            wrong = token_ids[token_ids >= self._vocab_size][0]
            raise ProtocolError(f"{what} has token id {wrong}; the model's vocabulary ends at {self._vocab_size - 1}")

    def _length_limit(self) -> str:
        return f"sequences have 1 to {self._max_model_len} tokens"

    def _grow_rows(self, num_rows: int) -> None:
        if num_rows <= self._is_used.size:
            return
        rows = min(max(num_rows, 2 * self._is_used.size, _FIRST_ROWS), MAX_ROWS)
        self._is_used = _grown(self._is_used, rows)
        self.num_given_tokens = _grown(self.num_given_tokens, rows)
        self._num_tokens = _grown(self._num_tokens, rows)
        self._num_blocks = _grown(self._num_blocks, rows)
        self.temperature = _grown(self.temperature, rows)
        self.top_k = _grown(self.top_k, rows)
        self.top_p = _grown(self.top_p, rows)
        self.min_p = _grown(self.min_p, rows)
        self.seed = _grown(self.seed, rows)
        self.token_ids = _grown(self.token_ids, rows, self.token_ids.shape[1])
        self.block_ids = _grown(self.block_ids, rows, self.block_ids.shape[1])

    def _grow_tokens(self, num_tokens: int) -> None:
        rows, width = self.token_ids.shape
        if num_tokens > width:
            self.token_ids = _grown(self.token_ids, rows, max(num_tokens, 2 * width, _FIRST_TOKENS))

    def _grow_blocks(self, num_blocks: int) -> None:
        rows, width = self.block_ids.shape
        if num_blocks > width:
            self.block_ids = _grown(self.block_ids, rows, max(num_blocks, 2 * width, _FIRST_TOKENS // self.block_size))


def _places(
    rows: NDArray[np.int64], first: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return rows and columns of ``counts[i]`` places in row ``rows[i]`` from ``first[i]`` on, one after the other."""
    if _largest(counts) == 1:
        (some,) = counts.nonzero()
        return rows[some], first[some]
    ends = counts.cumsum()
    return rows.repeat(counts), np.arange(ends[-1]) + (first - ends + counts).repeat(counts)


def _largest(values: NDArray[np.integer[Any]]) -> int:
    """Return the largest; of a few numbers in a third of the time that ``max`` takes."""
    return int(values[values.argmax()])


def _least(values: NDArray[np.integer[Any]]) -> int:
    return int(values[values.argmin()])


def _grown(array: NDArray[_Scalar], *shape: int) -> NDArray[_Scalar]:
    larger = np.zeros(shape, array.dtype)
    larger[tuple(slice(length) for length in array.shape)] = array
    return larger
