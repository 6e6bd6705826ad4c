"""The K/V of one rank's layers, in blocks (PagedAttention, Kwon et al. 2023).

Knows the tensors and what they weigh; which block belongs to whom is the scheduler's to know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernels.memory import huge_pages
from services.worker.model.partition import kv_heads_of_rank
from shared.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from shared.model.config import ModelConfig

__all__ = ["KvCache", "LayerKv", "bytes_per_block", "num_blocks_within"]


class LayerKv(NamedTuple):
    """One layer's keys and values, each [num_blocks, block_size, kv_heads_of_rank, head_dim]."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class KvCache:
    """K and V of this rank's layers, in the stage's order."""

    layers: tuple[LayerKv, ...]
    num_blocks: int
    block_size: int
    """Tokens in a block."""

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        *,
        num_layers: int,
        tp_size: int,
        tp_rank: int = 0,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> KvCache:
        """Reserve the blocks of ``num_layers`` layers; on CPUs, memory is taken only as it is written.

        Raises ConfigError when it does not fit the device.
        """
        heads = len(kv_heads_of_rank(config, tp_rank, tp_size))
        shape = (num_blocks, block_size, heads, config.head_dim)
        try:
            # One allocation, so that a failure leaves nothing behind and the system gives fresh pages.
            both = _empty((num_layers, 2, *shape), device, dtype)
        except (MemoryError, RuntimeError) as error:
            raise ConfigError(
                f"{num_blocks} K/V blocks of {block_size} tokens do not fit the memory of {device}: "
                "give the worker a smaller K/V budget."
            ) from error
        return cls(tuple(LayerKv(k, v) for k, v in both), num_blocks, block_size)


def _empty(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    if device.type == "cpu":
        return huge_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
    return torch.empty(shape, device=device, dtype=dtype)


def bytes_per_block(
    config: ModelConfig, *, num_layers: int, tp_size: int, block_size: int, dtype: torch.dtype, tp_rank: int = 0
) -> int:
    """Return the bytes of K and V that one block takes over ``num_layers`` layers on one rank."""
    heads = len(kv_heads_of_rank(config, tp_rank, tp_size))
    return 2 * num_layers * block_size * heads * config.head_dim * dtype.itemsize


def num_blocks_within(budget_bytes: int, block_bytes: int) -> int:
    """Return how many blocks fit the budget; ConfigError when not even one does."""
    num_blocks = budget_bytes // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"A K/V budget of {budget_bytes} bytes does not hold one block of {block_bytes} bytes: raise the budget."
        )
    return num_blocks
