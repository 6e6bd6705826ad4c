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

__all__ = ["FlatTokens", "flatten", "forward_batch", "late_tokens", "sampling_columns"]


class FlatTokens(NamedTuple):
    """The T tokens of B sequences side by side, in batch order."""

    rows: NDArray[np.int64]
    """[T] the table row of each token."""
    positions: NDArray[np.int64]
    """[T] the place of each token in its sequence."""
    query_start: NDArray[np.int64]
    """[B + 1] where each sequence's tokens start."""


def flatten(batch: Batch) -> FlatTokens:
    """Say which token of which row stands where."""
    lengths = batch.num_tokens
    if lengths.size == lengths.sum():  # decodes only, the most frequent iteration by far: nothing to spread
        return FlatTokens(batch.rows, batch.num_computed_tokens, np.arange(lengths.size + 1))
    query_start = np.concatenate(([0], np.cumsum(lengths)))
    positions = np.arange(query_start[-1]) + np.repeat(batch.num_computed_tokens - query_start[:-1], lengths)
    return FlatTokens(np.repeat(batch.rows, lengths), positions, query_start)


def forward_batch(table: SequenceTable, batch: Batch, flat: FlatTokens, device: torch.device) -> ForwardBatch:
    """Return the model's input for ``batch``, which ``table.apply`` has checked; late tokens are yet to be filled in.

    The token at position p of a sequence has its K and V in slot ``block_table[p // block_size] * block_size + p %
    block_size``.
    """
    block_of_token, offsets = np.divmod(flat.positions, table.block_size)
    context_lens = batch.num_computed_tokens + batch.num_tokens
    max_blocks = -(-int(context_lens.max(initial=0)) // table.block_size)
    return ForwardBatch.from_arrays(
        token_ids=table.token_ids[flat.rows, flat.positions],
        positions=flat.positions,
        slot_mapping=table.block_ids[flat.rows, block_of_token].astype(np.int64) * table.block_size + offsets,
        query_start=flat.query_start,
        context_lens=context_lens,
        block_tables=table.block_ids[batch.rows, :max_blocks],
        sample_rows=flat.query_start[1:][batch.samples] - 1,
        device=device,
    )


def late_tokens(table: SequenceTable, flat: FlatTokens) -> NDArray[np.int64]:
    """Return the places, among the flat tokens, of those that no plan has brought."""
    return np.flatnonzero(flat.positions >= table.num_given_tokens[flat.rows])


def sampling_columns(table: SequenceTable, batch: Batch) -> SamplingColumns:
    """Return the parameters of the S sequences of ``batch`` that sample, in batch order.

    A token's position is its index in the whole sequence, prompt and output, hence the same after a recomputation.
    """
    rows = batch.rows[batch.samples]
    return SamplingColumns(
        temperature=table.temperature[rows],
        top_k=table.top_k[rows],
        top_p=table.top_p[rows],
        min_p=table.min_p[rows],
        seed=table.seed[rows],
        position=(batch.num_computed_tokens + batch.num_tokens)[batch.samples],
    )
