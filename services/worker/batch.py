"""One iteration's input, flattened: the tokens of all its requests in a single row of columns (selective batching).

Knows shapes and types only; who fills it from a control message is elsewhere, and so is the K/V that it points into.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from torch import Tensor

__all__ = ["ForwardBatch", "device_column"]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of B requests; request i owns the tokens ``query_start[i] : query_start[i + 1]``.

    A prefill, a chunk of one and a decode differ only in their number of tokens.
    """

    token_ids: Tensor
    """[T] int64; read by the first stage only, and may be empty elsewhere."""
    positions: Tensor
    """[T] int64, place of each token in its sequence, from 0."""
    slot_mapping: Tensor
    """[T] int64, where each token's K and V go: block * block_size + offset."""
    query_start: Tensor
    """[B + 1] int32, from 0 to T."""
    context_lens: Tensor
    """[B] int32, tokens of each request in the K/V once this iteration's are written."""
    block_tables: Tensor
    """[B, max_blocks] int32, each request's blocks in order, padded with 0."""
    sample_rows: Tensor
    """[S] int64, the tokens (0 … T-1) after which one is sampled."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return self.positions.shape[0]

    @property
    def num_requests(self) -> int:
        """Number of requests, B."""
        return self.context_lens.shape[0]

    @classmethod
    def from_arrays(
        cls,
        *,
        token_ids: ArrayLike,
        positions: ArrayLike,
        slot_mapping: ArrayLike,
        query_start: ArrayLike,
        context_lens: ArrayLike,
        block_tables: ArrayLike,
        sample_rows: ArrayLike,
        device: torch.device,
    ) -> ForwardBatch:
        """Copy NumPy arrays (or lists) to ``device``, each as the type that its field states."""
        return cls(
            token_ids=device_column(token_ids, np.int64, device),
            positions=device_column(positions, np.int64, device),
            slot_mapping=device_column(slot_mapping, np.int64, device),
            query_start=device_column(query_start, np.int32, device),
            context_lens=device_column(context_lens, np.int32, device),
            block_tables=device_column(block_tables, np.int32, device),
            sample_rows=device_column(sample_rows, np.int64, device),
        )


def device_column(values: ArrayLike, dtype: type[np.generic], device: torch.device) -> Tensor:
    """Copy a NumPy array (or a list) to ``device`` without waiting; the caller may fill its own anew at once.

    Any thread may do it: all of them issue to the device's one default stream, so whatever is issued later sees it.
    """
    host = torch.from_numpy(np.array(values, dtype=dtype))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
