"""How the ranks of one stage add up and put together their partial results (Megatron-LM, Shoeybi et al. 2019).

Knows the two collectives that a split layer needs; not which layer, nor how the process group came to be. Every rank of
the stage makes the same calls in the same order, with the same shapes, which each knows from its control message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DistributedTensorParallel", "SingleRank", "TensorParallel"]


class TensorParallel(Protocol):
    """One rank's view of the ranks that share its stage."""

    @property
    def rank(self) -> int:
        """This rank, 0 … size-1."""

    @property
    def size(self) -> int:
        """Number of ranks that share the stage."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the ranks, in place, and return it."""

    def gather_last_dim(self, tensor: Tensor) -> Tensor:
        """Return the ranks' tensors, all of one shape [..., n], side by side: [..., size * n], on every rank."""


@dataclass(frozen=True, slots=True)
class SingleRank:
    """A stage of one rank: nothing to exchange."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, already the sum."""
        return tensor

    def gather_last_dim(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, already whole."""
        return tensor


class DistributedTensorParallel:
    """The ranks of a torch.distributed process group (NCCL on GPUs, gloo on CPUs)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank: int = group.rank()
        self.size: int = group.size()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the ranks, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def gather_last_dim(self, tensor: Tensor) -> Tensor:
        """Return the ranks' tensors side by side along the last axis."""
        if self.size == 1:
            return tensor
        parts = tensor.new_empty((self.size, *tensor.shape))
        dist.all_gather_single(parts.view(-1, *tensor.shape[1:]), tensor.contiguous(), group=self._group)
        return torch.cat(parts.unbind(0), dim=-1)
