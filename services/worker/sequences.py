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

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from shared.errors import ProtocolError
from shared.sampling import MAX_LOGPROBS, sampling_fault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shared.messages import NewSequence, StepPlan

__all__ = ["MAX_ROWS", "Batch", "SequenceTable"]

MAX_ROWS = 1 << 17
"""Rows at most: twice the largest batch that can be configured, far above what a scheduler has in its pool."""

_Scalar = TypeVar("_Scalar", bound=np.generic)

_FIRST_ROWS = 64
_FIRST_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one iteration, B of them in batch order."""

    rows: NDArray[np.int64]
    """[B] rows of the table."""
    num_computed_tokens: NDArray[np.int64]
    """[B] position of each sequence's first token of this iteration."""
    num_tokens: NDArray[np.int64]
    """[B] tokens of each sequence in this iteration, at least 1."""
    samples: NDArray[np.bool_]
    """[B] whether a token is sampled after the last of them."""


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
        self.top_k = np.zeros(0, np.int64)
        self.top_p = np.zeros(0, np.float32)
        self.min_p = np.zeros(0, np.float32)
        self.seed = np.zeros(0, np.uint64)

    @property
    def num_sequences(self) -> int:
        """Rows in use."""
        return int(self._is_used.sum())

    def apply(self, plan: StepPlan) -> Batch:
        """Release, learn, append, reserve, in that order, and return the batch to compute.

        Raises ``ProtocolError`` naming what does not fit; the table is then half changed and of no further use.
        """
        what = f"step {plan.step_id}"
        for row in plan.released_rows:
            self._release(what, row)
        for sequence in plan.new_sequences:
            self._learn(what, sequence)
        rows = np.array(plan.rows, np.int64)
        self._check_rows(what, rows)
        if rows.size:
            self._append_tokens(what, rows, plan.num_appended_tokens, plan.appended_token_ids)
            self._append_blocks(what, rows, plan.num_new_blocks, plan.new_block_ids)
        batch = Batch(
            rows=rows,
            num_computed_tokens=np.array(plan.num_computed_tokens, np.int64),
            num_tokens=np.array(plan.num_tokens, np.int64),
            samples=np.array(plan.samples, np.bool_),
        )
        self._check_batch(what, batch)
        if self._reserves_sampled:
            self._reserve(what, batch)
        return batch

    def _release(self, what: str, row: int) -> None:
        if not (0 <= row < self._is_used.size and self._is_used[row]):
            raise ProtocolError(f"{what} releases row {row}, which holds no sequence")
        self._is_used[row] = False
        self.block_ids[row, : self._num_blocks[row]] = 0
        self._num_blocks[row] = 0
        self._num_tokens[row] = 0

    def _learn(self, what: str, sequence: NewSequence) -> None:
        row, num_tokens = sequence.row, len(sequence.token_ids)
        if not 0 <= row < MAX_ROWS:
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

    def _append_tokens(self, what: str, rows: NDArray[np.int64], counts: Sequence[int], ids: Sequence[int]) -> None:
        if not ids:
            return
        token_ids = np.array(ids, np.int64)
        self._check_tokens(what, token_ids)
        new = np.array(counts, np.int64)
        totals = self._num_tokens[rows] + new
        too_long = totals > self._max_model_len
        if too_long.any():
            row = rows[too_long][0]
            raise ProtocolError(f"{what} makes row {row} {totals[too_long][0]} tokens long; {self._length_limit()}")
        late = (new > 0) & (self.num_given_tokens[rows] < self._num_tokens[rows])
        if late.any():
            raise ProtocolError(f"{what} brings tokens for row {rows[late][0]}, whose own samples were to come first")
        self._grow_tokens(int(totals.max()))
        self.token_ids[np.repeat(rows, new), _places(self._num_tokens[rows], new)] = token_ids
        self._num_tokens[rows] = totals
        self.num_given_tokens[rows] += new

    def _append_blocks(self, what: str, rows: NDArray[np.int64], counts: Sequence[int], ids: Sequence[int]) -> None:
        if not ids:
            return
        block_ids = np.array(ids, np.int64)
        if block_ids.min() < 0 or block_ids.max() >= self._num_kv_blocks:
            wrong = block_ids[(block_ids < 0) | (block_ids >= self._num_kv_blocks)][0]
            raise ProtocolError(f"{what} names block {wrong}; this worker has blocks 0 to {self._num_kv_blocks - 1}")
        new = np.array(counts, np.int64)
        totals = self._num_blocks[rows] + new
        most = -(-self._max_model_len // self.block_size)
        if totals.max() > most:
            row = rows[totals > most][0]
            raise ProtocolError(
                f"{what} gives row {row} {totals.max()} blocks; {most} hold the longest sequence "
                f"({self._max_model_len} tokens)"
            )
        self._grow_blocks(int(totals.max()))
        self.block_ids[np.repeat(rows, new), _places(self._num_blocks[rows], new)] = block_ids
        self._num_blocks[rows] = totals

    def _reserve(self, what: str, batch: Batch) -> None:
        """Count the token that each sequence of ``batch`` samples, if the longest sequence has a place for it.

        Of the late tokens only the latest can be filled in: an earlier one is refused.
        """
        lengths = self._num_tokens[batch.rows]
        ends = batch.num_computed_tokens + batch.num_tokens
        first_late = np.maximum(batch.num_computed_tokens, self.num_given_tokens[batch.rows])
        gone = first_late < np.minimum(ends, lengths - 1)
        if gone.any():
            raise ProtocolError(
                f"{what} computes token {first_late[gone][0]} of row {batch.rows[gone][0]}, which was sampled here "
                f"and is not kept"
            )
        lengths += batch.samples & (lengths < self._max_model_len)
        self._grow_tokens(int(lengths.max(initial=0)))
        self._num_tokens[batch.rows] = lengths

    def _check_rows(self, what: str, rows: NDArray[np.int64]) -> None:
        if not rows.size:
            return
        in_table = rows.min() >= 0 and rows.max() < self._is_used.size
        if not in_table or not self._is_used[rows].all():
            row = next(row for row in rows if not (0 <= row < self._is_used.size and self._is_used[row]))
            raise ProtocolError(f"{what} computes row {row}, which holds no sequence")
        if len(set(rows.tolist())) != rows.size:
            raise ProtocolError(f"{what} computes a row twice")

    def _check_batch(self, what: str, batch: Batch) -> None:
        ends = batch.num_computed_tokens + batch.num_tokens
        empty = batch.num_tokens < 1
        if empty.any():
            raise ProtocolError(f"{what} computes no token of row {batch.rows[empty][0]}")
        unknown = ends > self._num_tokens[batch.rows]
        if unknown.any():
            row = batch.rows[unknown][0]
            raise ProtocolError(
                f"{what} computes row {row} up to token {ends[unknown][0]}, but only {self._num_tokens[row]} are known"
            )
        homeless = ends > self._num_blocks[batch.rows] * self.block_size
        if homeless.any():
            row = batch.rows[homeless][0]
            raise ProtocolError(
                f"{what} computes row {row} up to token {ends[homeless][0]}, but its {self._num_blocks[row]} blocks "
                f"hold {self._num_blocks[row] * self.block_size}"
            )

    def _check_tokens(self, what: str, token_ids: NDArray[np.int64] | NDArray[np.uint32]) -> None:
        if token_ids.min() < 0 or token_ids.max() >= self._vocab_size:
            wrong = token_ids[(token_ids < 0) | (token_ids >= self._vocab_size)][0]
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


def _places(first: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return first[i], first[i] + 1, … ``counts[i]`` times, one after the other."""
    ends: NDArray[np.int64] = np.cumsum(counts)
    places: NDArray[np.int64] = np.arange(ends[-1]) + np.repeat(first - ends + counts, counts)
    return places


def _grown(array: NDArray[_Scalar], *shape: int) -> NDArray[_Scalar]:
    larger = np.zeros(shape, array.dtype)
    larger[tuple(slice(length) for length in array.shape)] = array
    return larger
