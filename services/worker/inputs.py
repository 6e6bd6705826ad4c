"""From a batch of table rows to what the model and the sampler take: flat columns (selective batching, ORCA §3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from services.worker.batch import ForwardBatch
from services.worker.sampler import SamplingColumns

if TYPE_CHECKING:
    import torch

    from services.worker.sequences import Batch, SequenceTable

__all__ = ["forward_batch", "sampling_columns"]


def forward_batch(table: SequenceTable, batch: Batch, device: torch.device) -> ForwardBatch:
    """Flatten ``batch``, which ``table.apply`` has checked: T tokens of B sequences, in batch order.

    The token at position p of a sequence has its K and V in slot ``block_table[p // block_size] * block_size + p %
    block_size``.
    """
    lengths = batch.num_tokens
    if lengths.size == lengths.sum():  # decodes only, the most frequent iteration by far: nothing to spread
        query_start = np.arange(lengths.size + 1)
        row_of_token, positions = batch.rows, batch.num_computed_tokens
    else:
        query_start = np.concatenate(([0], np.cumsum(lengths)))
        row_of_token = np.repeat(batch.rows, lengths)
        positions = np.arange(query_start[-1]) + np.repeat(batch.num_computed_tokens - query_start[:-1], lengths)
    block_of_token = positions // table.block_size
    offsets = positions - block_of_token * table.block_size
    context_lens = batch.num_computed_tokens + lengths
    max_blocks = -(-int(context_lens.max(initial=0)) // table.block_size)
    return ForwardBatch.from_arrays(
        token_ids=table.token_ids[row_of_token, positions],
        positions=positions,
        slot_mapping=table.block_ids[row_of_token, block_of_token].astype(np.int64) * table.block_size + offsets,
        query_start=query_start,
        context_lens=context_lens,
        block_tables=table.block_ids[batch.rows, :max_blocks],
        sample_rows=query_start[1:][batch.samples] - 1,
        device=device,
    )


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
