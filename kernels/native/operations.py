"""Single operations of the compiled library as Python functions over torch tensors; knows the functions' signatures.

Meaning and shapes are those of ``kernels.reference``. Activations are float32 without gaps; where it is said, rows may
lie apart. K and V are float32 or bfloat16, in the kernels' own order within each block (kv.h), which nobody else reads.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch

from kernels.native.library import CKv, CNorm, CShape, CStep, function
from kernels.native.threads import threads_for

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.native.library import NativeKernels

__all__ = ["Operations"]


class CAngles(Structure):
    """``Angles`` of elementwise.h."""

    _fields_ = (("cos", c_void_p), ("sin", c_void_p))


class CNewKv(Structure):
    """``NewKv`` of operations.cpp."""

    _fields_ = (
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
        ("slots", c_void_p),
    )


class CSampling(Structure):
    """``Sampling`` of sampling.cpp."""

    _fields_ = (
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("uniform", c_void_p),
    )


class _OfNumber:
    """The functions that there are for each type of K and V."""

    def __init__(self, library: ctypes.CDLL, suffix: str) -> None:
        self.attention = function(
            library[f"orca_attention{suffix}"],
            None,
            *(POINTER(CStep), POINTER(CShape), POINTER(CKv), c_void_p, c_int64, c_void_p, c_float, c_int),
        )
        self.write_kv = function(
            library[f"orca_write_kv{suffix}"],
            None,
            *(POINTER(CNewKv), c_int64, POINTER(CShape), POINTER(CKv), c_int),
        )
        self.rotate_and_write_kv = function(
            library[f"orca_rotate_and_write_kv{suffix}"],
            None,
            *(c_void_p, c_int64, POINTER(CNewKv), POINTER(CAngles), c_int64, POINTER(CShape), POINTER(CKv), c_int),
        )


class Operations:
    """The library's functions for single operations."""

    def __init__(self, kernels: NativeKernels) -> None:
        library = kernels.library
        self._rms_norm = function(
            library.orca_rms_norm, None, *(c_void_p, c_int64, c_int64, POINTER(CNorm), c_void_p, c_int)
        )
        self._add_rms_norm = function(
            library.orca_add_rms_norm, None, *(c_void_p, c_void_p, c_int64, c_int64, POINTER(CNorm), c_void_p, c_int)
        )
        self._silu_mul = function(library.orca_silu_mul, None, *(c_void_p, c_int64, c_int64, c_void_p, c_int))
        self._sample = function(
            library.orca_sample, None, *(c_void_p, c_int64, c_int64, POINTER(CSampling), c_void_p, c_void_p, c_int)
        )
        self._of_number = {torch.bfloat16: _OfNumber(library, "_bf16"), torch.float32: _OfNumber(library, "_f32")}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / rms(x) * weight."""
        out = torch.empty_like(x)
        n, norm = x.shape[-1], CNorm(weight.data_ptr(), eps)
        self._rms_norm(x.data_ptr(), x.numel() // n, n, byref(norm), out.data_ptr(), torch.get_num_threads())
        return out

    def add_rms_norm(self, update: Tensor, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add ``hidden`` to ``update`` in place, and return that normalised."""
        out = torch.empty_like(update)
        n, norm, threads = update.shape[-1], CNorm(weight.data_ptr(), eps), torch.get_num_threads()
        rows = update.numel() // n
        self._add_rms_norm(update.data_ptr(), hidden.data_ptr(), rows, n, byref(norm), out.data_ptr(), threads)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up."""
        n = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], n)
        self._silu_mul(gate_up.data_ptr(), out.numel() // n, n, out.data_ptr(), torch.get_num_threads())
        return out

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """Store k and v, whose rows may lie apart."""
        shape, kv = CShape(0, *k.shape[1:]), CKv(k_cache.data_ptr(), v_cache.data_ptr())
        slots = _plain(slot_mapping, torch.int64)
        write, new = self._of_number[k_cache.dtype].write_kv, _new_kv(k, v, slots)
        write(byref(new), k.shape[0], byref(shape), byref(kv), torch.get_num_threads())

    def rotate_and_write_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Turn q and k in place, whose rows may lie apart, and store k and v."""
        shape, kv = CShape(q.shape[1], *k.shape[1:]), CKv(k_cache.data_ptr(), v_cache.data_ptr())
        cos, sin, slots = _plain(cos, torch.float32), _plain(sin, torch.float32), _plain(slot_mapping, torch.int64)
        angles, new, threads = CAngles(cos.data_ptr(), sin.data_ptr()), _new_kv(k, v, slots), torch.get_num_threads()
        turn = self._of_number[k_cache.dtype].rotate_and_write_kv
        turn(q.data_ptr(), q.stride(0), byref(new), byref(angles), q.shape[0], byref(shape), byref(kv), threads)

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        scale: float,
    ) -> Tensor:
        """Return causal attention of each request over its own blocks; rows of q may lie apart."""
        num_tokens, num_heads, dim = q.shape
        out = q.new_empty(num_tokens, num_heads, dim)
        query_start, context_lens = _plain(query_start, torch.int32), _plain(context_lens, torch.int32)
        block_tables = _plain(block_tables, torch.int32)
        step = CStep(
            num_tokens,
            context_lens.shape[0],
            None,
            None,
            query_start.data_ptr(),
            context_lens.data_ptr(),
            block_tables.data_ptr(),
            block_tables.shape[1],
            k_cache.shape[1],
        )
        shape, kv = CShape(num_heads, k_cache.shape[2], dim), CKv(k_cache.data_ptr(), v_cache.data_ptr())
        attend, threads = self._of_number[k_cache.dtype].attention, torch.get_num_threads()
        attend(byref(step), byref(shape), byref(kv), q.data_ptr(), q.stride(0), out.data_ptr(), scale, threads)
        return out

    def sample(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return a token for each row, and whether it is valid."""
        num_rows, vocab_size = logits.shape
        token_ids, valid = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.bool)
        given, dtypes = (temperature, top_k, top_p, min_p, uniform), _SAMPLING_DTYPES
        columns = [_plain(column, dtype) for column, dtype in zip(given, dtypes, strict=True)]
        sampling = CSampling(*(column.data_ptr() for column in columns))
        out, threads = (token_ids.data_ptr(), valid.data_ptr()), threads_for(num_rows)
        self._sample(logits.data_ptr(), num_rows, vocab_size, byref(sampling), *out, threads)
        return token_ids, valid


_SAMPLING_DTYPES = (torch.float32, torch.int32, torch.float32, torch.float32, torch.float64)
"""Of temperature, top_k, top_p, min_p, uniform."""


def _plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return it as the library reads it by its address; itself where it is so. To be kept while the library runs."""
    return x.to(dtype).contiguous()


def _new_kv(k: Tensor, v: Tensor, slots: Tensor) -> CNewKv:
    return CNewKv(k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0), slots.data_ptr())
