"""From a batch of table rows to what the model and the sampler take: flat columns (selective batching, ORCA §3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from services.worker.batch import ForwardBatch
from services.worker.sampling.drawing import SamplingColumns

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from services.worker.sequences import Batch, SequenceTable

__all__ = ["FlatTokens", "flatten", "forward_batch", "greedy_columns", "sampling_columns"]

_NO_PLACES = np.zeros(0, np.int64)


class FlatTokens(NamedTuple):
    """The T tokens of B sequences side by side, in batch order."""

    rows: NDArray[np.int64]
    """[T] the table row of each token."""
    positions: NDArray[np.int64]
    """[T] the place of each token in its sequence."""
    query_start: NDArray[np.int64]
    """[B + 1] where each sequence's tokens start."""
    late: NDArray[np.int64] | None
    """The places, among the T, of tokens that no plan has brought; None: all of them."""


def flatten(batch: Batch) -> FlatTokens:
    """Say which token of which row stands where."""
    if batch.is_decode:  # nothing to spread
        rows, positions, given = batch.rows, batch.num_computed_tokens, batch.num_given_tokens
        query_start = np.arange(rows.size + 1)
    else:
        lengths = batch.num_tokens
        query_start = np.concatenate(([0], lengths.cumsum()))
        rows = batch.rows.repeat(lengths)
        positions = np.arange(query_start[-1]) + (batch.num_computed_tokens - query_start[:-1]).repeat(lengths)
        given = None if batch.num_given_tokens is None else batch.num_given_tokens.repeat(lengths)
    if given is None:
        return FlatTokens(rows, positions, query_start, _NO_PLACES)
    missing = given - positions
    if missing[missing.argmax()] <= 0:
        return FlatTokens(rows, positions, query_start, None)
    return FlatTokens(rows, positions, query_start, (missing <= 0).nonzero()[0])


def forward_batch(table: SequenceTable, batch: Batch, flat: FlatTokens, device: torch.device) -> ForwardBatch:
    """Return the model's input for ``batch``, which ``table.apply`` has checked; late tokens are yet to be filled in.

    The token at position p of a sequence has its K and V in slot ``block_table[p // block_size] * block_size + p %
    block_size``.
    """
    size = table.block_size
    rows, positions = flat.rows, flat.positions
    index = positions // size
    # block * size + offset, where the offset is position - index * size
    slots = (table.block_ids[rows, index] - index) * size + positions
    last_tokens = flat.query_start[1:] - 1
    return ForwardBatch.from_arrays(
        token_ids=np.empty(rows.size, np.int64) if flat.late is None else table.token_ids[rows, positions],
        positions=positions,
        slot_mapping=slots,
        query_start=flat.query_start,
        context_lens=batch.context_lens,
        block_tables=table.block_ids[batch.rows, : -(-batch.longest // size)],
        sample_rows=last_tokens if batch.all_sample else last_tokens[batch.samples],
        device=device,
    )


def sampling_columns(table: SequenceTable, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> SamplingColumns:
    """Return the parameters of sequences in ``rows`` [S], each of which samples the token for its position [S].

    A token's position is its index in the whole sequence, prompt and output, hence the same after a recomputation.
    """
    return SamplingColumns(
        temperature=table.temperature[rows],
        top_k=table.top_k[rows],
        top_p=table.top_p[rows],
        min_p=table.min_p[rows],
        seed=table.seed[rows],
        position=positions,
    )


def greedy_columns(num_rows: int) -> SamplingColumns:
    """Return the parameters of sequences of which each takes the most likely token."""
    zeros = np.zeros(num_rows, np.int64)
    return SamplingColumns(
        temperature=np.zeros(num_rows, np.float32),
        top_k=np.zeros(num_rows, np.int32),
        top_p=np.ones(num_rows, np.float32),
        min_p=np.zeros(num_rows, np.float32),
        seed=zeros,
        position=zeros,
    )
