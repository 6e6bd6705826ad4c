"""Linear layers split over the ranks of a stage (Megatron-LM, Shoeybi et al. 2019), and the vocabulary's two.

All matrix products of a model go through :func:`matmul`, so that how they are reduced can be decided in one place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone uses

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from services.worker.tensor_parallel import TensorParallel

__all__ = [
    "ColumnParallelLinear",
    "LogitsMemory",
    "OutputHead",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "embed_over_ranks",
    "matmul",
]


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias; x [..., in], weight [out, in]."""
    return F.linear(x, weight, bias)


@dataclass(frozen=True, slots=True)
class ColumnParallelLinear:
    """This rank's outputs of a layer; every rank has the whole input."""

    weight: Tensor
    """[out_of_rank, in]"""
    bias: Tensor | None
    """[out_of_rank]"""

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, out_of_rank]; x [T, in]."""
        return matmul(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class RowParallelLinear:
    """A layer whose inputs lie spread over the ranks; every rank ends with the whole output."""

    weight: Tensor
    """[out, in_of_rank]"""
    bias: Tensor | None
    """[out], added once, after the sum."""
    tp: TensorParallel

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, out]; x [T, in_of_rank]."""
        out = self.tp.all_reduce(matmul(x, self.weight))
        return out if self.bias is None else out.add_(self.bias)


def embed_over_ranks(
    token_ids: Tensor, vocab: range, tp: TensorParallel, rows_of: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return [T, hidden] where each rank has the rows of its ``vocab`` only, which ``rows_of`` looks up."""
    if tp.size == 1:
        return rows_of(token_ids)
    elsewhere = (token_ids < vocab.start) | (token_ids >= vocab.stop)
    local = (token_ids - vocab.start).masked_fill_(elsewhere, 0)
    return tp.all_reduce(rows_of(local).masked_fill_(elsewhere.unsqueeze(1), 0.0))


@dataclass(frozen=True, slots=True)
class VocabParallelEmbedding:
    """The embedding table, of which each rank holds some tokens' rows."""

    table: Tensor
    """[vocab_of_rank + padding, hidden]"""
    vocab: range
    """Token ids of this rank's rows."""
    tp: TensorParallel

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return [T, hidden]; token_ids [T] int64."""
        return embed_over_ranks(token_ids, self.vocab, self.tp, lambda rows: F.embedding(rows, self.table))


class LogitsMemory:
    """Rows of float32 on a CPU that the next call gets again: making fresh pages takes longer than filling them.

    A row of a vocabulary is 100 KiB or more. Grows; what is never written takes no memory.
    """

    def __init__(self, size: int) -> None:
        """``size``: of a row."""
        self._rows = torch.empty(0, size)

    def rows(self, count: int) -> Tensor:
        """Return [count, size], whose content means nothing."""
        if count > len(self._rows):
            self._rows = torch.empty(max(count, 2 * len(self._rows)), self._rows.shape[1])
        return self._rows[:count]


@dataclass(frozen=True, slots=True)
class OutputHead:
    """From hidden rows to logits; each rank computes its part of the vocabulary and gets all of them."""

    table: Tensor
    """[vocab_of_rank + padding, hidden], the same padded size on every rank; may be the embedding table itself."""
    vocab_size: int
    tp: TensorParallel

    def __call__(self, x: Tensor) -> Tensor:
        """Return [S, vocab_size] float32; x [S, hidden], normalised."""
        logits = self.tp.gather_last_dim(matmul(x, self.table))
        return logits[:, : self.vocab_size].float()
