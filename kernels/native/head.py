"""The output head of greedy requests: the most likely token of each row, without logits in memory."""

from __future__ import annotations

from ctypes import POINTER, byref, c_double, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch

from kernels.native.library import CPacked, function
from kernels.native.threads import threads_for

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.native.library import NativeKernels, PackedMatrix

__all__ = ["GreedyHead"]


class GreedyHead:
    """A packed vocabulary [vocab_size, k] behind the last norm."""

    def __init__(self, kernels: NativeKernels, vocab: PackedMatrix, norm: Tensor, eps: float) -> None:
        self._owned = (vocab, norm)  # what the addresses point into
        self._vocab = vocab.as_c()
        self._norm, self._eps = norm.data_ptr(), eps
        self._function = function(
            kernels.library.orca_greedy_head,
            c_int64,
            *(POINTER(CPacked), c_void_p, c_void_p, c_int64, c_void_p, c_double, c_void_p, c_void_p, c_int),
        )

    def __call__(self, hidden: Tensor, rows: Tensor) -> tuple[Tensor, list[int]]:
        """Return the tokens [S] int64 of some rows [S] int64 of ``hidden`` [T, k] float32, and whose mean nothing.

        They are those of the largest logits, to the last bit, the smaller id first among equals. Where numbers are
        not finite, the token is 0, and its place is among the second.
        """
        tokens, valid = torch.empty_like(rows), torch.empty(len(rows), dtype=torch.uint8)
        num_invalid = self._function(
            byref(self._vocab),
            hidden.data_ptr(),
            rows.data_ptr(),
            len(rows),
            self._norm,
            self._eps,
            tokens.data_ptr(),
            valid.data_ptr(),
            threads_for(len(rows)),
        )
        return tokens, (valid == 0).nonzero().flatten().tolist() if num_invalid else []
