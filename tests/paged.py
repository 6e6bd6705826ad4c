"""Requests over paged K/V whose unused slots hold what would spoil every sum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Heads", "Paged", "Request"]


class Request(NamedTuple):
    """One request of an iteration."""

    num_before: int
    """Tokens of earlier iterations."""
    num_new: int


class Heads(NamedTuple):
    """Shape of q, k and v."""

    num: int
    num_kv: int
    dim: int


@dataclass(frozen=True, slots=True)
class Paged:
    """One iteration: the arguments of attention, in scattered blocks."""

    q: Tensor
    """[T, H, D]"""
    k: Tensor
    """[all tokens of all requests, KH, D], request after request"""
    v: Tensor
    slots: Tensor
    """[all tokens of all requests]"""
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    cache_shape: tuple[int, int, int, int]

    @classmethod
    def of(
        cls, requests: list[Request], heads: Heads, *, dtype: torch.dtype, block_size: int = 16, seed: int = 0
    ) -> Paged:
        generator = torch.Generator().manual_seed(seed)
        ends = [request.num_before + request.num_new for request in requests]
        num_blocks = [math.ceil(end / block_size) for end in ends]
        order = torch.randperm(sum(num_blocks) + 3, generator=generator).to(torch.int32)
        tables = torch.zeros(len(requests), max(num_blocks), dtype=torch.int32)
        slots = []
        for table, blocks, end in zip(tables, torch.split(order, [*num_blocks, 3]), ends, strict=False):
            table[: len(blocks)] = blocks
            positions = torch.arange(end)
            slots.append(blocks[positions // block_size].long() * block_size + positions % block_size)
        starts = torch.tensor([0, *(request.num_new for request in requests)]).cumsum(0)

        def randn(num_tokens: int, num_heads: int) -> Tensor:
            return torch.randn(num_tokens, num_heads, heads.dim, generator=generator).to(dtype)

        return cls(
            q=randn(int(starts[-1]), heads.num),
            k=randn(sum(ends), heads.num_kv),
            v=randn(sum(ends), heads.num_kv),
            slots=torch.cat(slots),
            query_start=starts.to(torch.int32),
            context_lens=torch.tensor(ends, dtype=torch.int32),
            block_tables=tables,
            cache_shape=(len(order), block_size, heads.num_kv, heads.dim),
        )

    def caches(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return K and V in which nothing has been written."""
        k, v = torch.full((2, *self.cache_shape), torch.nan, dtype=dtype)
        return k, v
