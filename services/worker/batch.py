"""One iteration's input, flattened: the tokens of all its requests in a single row of columns (selective batching).

Knows shapes and types only; who fills it from a control message is elsewhere, and so is the K/V that it points into.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray
    from torch import Tensor

__all__ = ["ForwardBatch", "on_device"]

_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}
_ALIGNMENT = 16
"""Bytes; of each array within the copy."""


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
        """Bring NumPy arrays (or lists) to ``device``, each as the type that its field states.

        On a CPU an array that has this type already is not copied: nobody may write to it any more.
        """
        return cls(
            *on_device(
                device,
                np.ascontiguousarray(token_ids, np.int64),
                np.ascontiguousarray(positions, np.int64),
                np.ascontiguousarray(slot_mapping, np.int64),
                np.ascontiguousarray(query_start, np.int32),
                np.ascontiguousarray(context_lens, np.int32),
                np.ascontiguousarray(block_tables, np.int32),
                np.ascontiguousarray(sample_rows, np.int64),
            )
        )


def on_device(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """Return NumPy arrays as tensors on ``device``, without waiting; nobody may write to them any more.

    On a CPU they share memory. To another device all go as one copy, since each takes longer to issue than to do. Any
    thread may do it: all of them issue to the device's one default stream, so whatever is issued later sees it.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    ends = list(itertools.accumulate(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays))
    host = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for array, start in zip(arrays, (0, *ends), strict=False):
        host.numpy()[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        for array, start in zip(arrays, (0, *ends), strict=False)
    ]
