"""The operations on CPUs: ours in C++ where they take the tensors at hand, else torch's, which ``kernels.cpu`` has.

Shapes, types and meaning are those of ``kernels.reference``, but for the order of K and V within a block: it is the
library's where the library takes the cache, which depends on nothing but the cache, so that what is written is read.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from kernels import cpu
from kernels.native.library import DIM_MULTIPLE, MAX_HEAD_DIM, UNIT, KernelsUnavailableError, load
from kernels.native.operations import Operations

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["add_rms_norm", "paged_attention", "rms_norm", "rotate_and_write_kv", "sample", "silu_mul", "write_kv"]

_KV_DTYPES = (torch.float32, torch.bfloat16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``."""
    operations = _for_rows(x, weight)
    return cpu.rms_norm(x, weight, eps) if operations is None else operations.rms_norm(x, weight, eps)


def add_rms_norm(update: Tensor, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.add_rms_norm``."""
    operations = _for_rows(update, hidden, weight)
    if operations is None:
        return cpu.rms_norm(update.add_(hidden), weight, eps)
    return operations.add_rms_norm(update, hidden, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See ``reference.silu_mul``."""
    operations = _for_rows(gate_up)
    return cpu.silu_mul(gate_up) if operations is None else operations.silu_mul(gate_up)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See ``reference.write_kv``."""
    operations = _for_cache(k_cache)
    if operations is None:
        cpu.write_kv(k, v, k_cache, v_cache, slot_mapping)
    else:
        operations.write_kv(_heads_together(k), _heads_together(v), k_cache, v_cache, slot_mapping)


def rotate_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """See ``reference.rotate_and_write_kv``."""
    operations = _for_cache(k_cache)
    if operations is not None and all(_lie_together(x) for x in (q, k, v)):
        operations.rotate_and_write_kv(q, k, v, cos, sin, k_cache, v_cache, slot_mapping)
    else:
        cpu.apply_rotary(q, k, cos, sin)
        write_kv(k, v, k_cache, v_cache, slot_mapping)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
) -> Tensor:
    """See ``reference.paged_attention``."""
    operations = _for_cache(k_cache)
    if operations is None:
        return cpu.paged_attention(q, k_cache, v_cache, query_start, context_lens, block_tables, scale)
    return operations.paged_attention(
        _heads_together(q), k_cache, v_cache, query_start, context_lens, block_tables, scale
    ).to(q.dtype)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``reference.sample``."""
    operations, columns = _for_rows(logits), (temperature, top_k, top_p, min_p, uniform)
    return cpu.sample(logits, *columns) if operations is None else operations.sample(logits, *columns)


@functools.cache
def _library() -> Operations | None:
    try:
        return Operations(load())
    except KernelsUnavailableError:  # whoever serves a model has said so in its log
        return None


def _for_rows(*tensors: Tensor) -> Operations | None:
    """Return the library where it takes all of the tensors as they are."""
    plain = all(tensor.dtype is torch.float32 and tensor.is_contiguous() for tensor in tensors)
    return _library() if plain else None


def _for_cache(cache: Tensor) -> Operations | None:
    """Return the library where it takes K or V [num_blocks, block_size, KH, D]."""
    _, block_size, _, dim = cache.shape
    fits = not block_size % UNIT and not dim % DIM_MULTIPLE and dim <= MAX_HEAD_DIM
    return _library() if fits and cache.dtype in _KV_DTYPES and cache.is_contiguous() else None


def _heads_together(x: Tensor) -> Tensor:
    """Return [T, H, D] as the library takes it; itself where it is so."""
    return x if _lie_together(x) else x.float().contiguous()


def _lie_together(x: Tensor) -> bool:
    """Whether a token's heads are float32 numbers one after the other."""
    return x.dtype is torch.float32 and x.stride()[1:] == (x.shape[2], 1)
