"""The compiled kernels as Python functions over torch tensors. Knows their signatures; not what models make of them.

All tensors are contiguous, on the CPU, and of the type that is said; nothing here checks it again. Calls release the
interpreter while they run.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, Structure, byref, c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kernels.native.build import BuildError, build, cpu_flags, instruction_sets
from kernels.native.threads import threads_for

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DIM_MULTIPLE",
    "INTERMEDIATE_MULTIPLE",
    "MAX_HEAD_DIM",
    "UNIT",
    "CKv",
    "CLayer",
    "CModel",
    "CNorm",
    "CPacked",
    "CShape",
    "CStep",
    "CTimings",
    "KernelsUnavailableError",
    "NativeKernels",
    "PackedMatrix",
    "Workspace",
    "function",
    "load",
]

INTERMEDIATE_MULTIPLE = 32
"""Columns of gate and of up, each, are a multiple of it."""
UNIT = 16
"""Tokens that lie together in K and V; block sizes are multiples of it."""
MAX_HEAD_DIM = 256
DIM_MULTIPLE = 16
"""Numbers of a head are a multiple of it."""


class KernelsUnavailableError(Exception):
    """This machine has no compiled kernels, and why."""


class CPacked(Structure):
    """``Packed`` of linear.h."""

    _fields_ = (("groups", c_void_p), ("channels", c_void_p), ("scales", c_void_p), ("n", c_int64), ("k", c_int64))


class CShape(Structure):
    """``Shape`` of kv.h."""

    _fields_ = (("num_heads", c_int64), ("num_kv_heads", c_int64), ("head_dim", c_int64))


class CKv(Structure):
    """``Kv`` of kv.h."""

    _fields_ = (("k", c_void_p), ("v", c_void_p))


class CStep(Structure):
    """``Step`` of kv.h."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("num_requests", c_int64),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_start", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("max_blocks", c_int64),
        ("block_size", c_int64),
    )


class CNorm(Structure):
    """``Norm`` of elementwise.h."""

    _fields_ = (("weight", c_void_p), ("eps", c_double))


class CLayer(Structure):
    """``OrcaLlamaLayer`` of decoder.cpp."""

    _fields_ = (
        ("input_norm", CNorm),
        ("qkv", CPacked),
        ("qkv_bias", c_void_p),
        ("q_norm", CNorm),
        ("k_norm", CNorm),
        ("o", CPacked),
        ("post_norm", CNorm),
        ("gate_up", CPacked),
        ("down", CPacked),
        ("kv", CKv),
    )


class CModel(Structure):
    """``OrcaLlama`` of decoder.cpp."""

    _fields_ = (
        ("shape", CShape),
        ("hidden_size", c_int64),
        ("intermediate_size", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
    )


class CTimings(Structure):
    """``OrcaTimings`` of decoder.cpp."""

    _fields_ = (("products", c_int64), ("attention", c_int64), ("other", c_int64))


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Quantised weights [n, k] in the forms that linear.h describes."""

    n: int
    k: int
    groups: Tensor | None
    """uint8: 4 bits, one scale and one offset for each row and 32 columns; where weights have that form exactly."""
    channels: Tensor
    """uint8: 8 bits, one scale for each row."""
    scales: Tensor
    """float32, of channels."""

    def as_c(self) -> CPacked:
        """As the kernels take it; valid while this object lives."""
        groups = None if self.groups is None else self.groups.data_ptr()
        return CPacked(groups, self.channels.data_ptr(), self.scales.data_ptr(), self.n, self.k)


class Workspace:
    """Memory for what a call computes on its way; grows, and is used again by the next call."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def address(self, num_bytes: int) -> int:
        """Where there are so many bytes, aligned to a cache line."""
        if self._memory.numel() < num_bytes + 64:
            self._memory = torch.empty(num_bytes + 64, dtype=torch.uint8)
        return -(-self._memory.data_ptr() // 64) * 64


class NativeKernels:
    """The library's functions."""

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        """Of the instruction set, for logs."""
        self.failures: tuple[str, ...] = ()
        """Why better instruction sets of this machine are not used."""
        self.library = library = ctypes.CDLL(str(path))
        """Of which ``operations`` knows other functions."""
        self.few_rows: int = function(library.orca_few_rows, c_int64)()
        """The most rows for which products use weights of 4 bits."""
        self._linear = function(
            library.orca_linear,
            None,
            *(POINTER(CPacked), c_void_p, c_int64, c_void_p, c_double, c_void_p, c_void_p, c_int),
        )
        self._linear_bytes = function(library.orca_linear_workspace_bytes, c_int64, c_int64, c_int64)
        self._gather = function(library.orca_gather_rows, None, POINTER(CPacked), c_void_p, c_int64, c_void_p)
        self.layers_bytes = function(library.orca_workspace_bytes, c_int64, POINTER(CModel), c_int64)
        self.layers = function(
            library.orca_llama_layers,
            None,
            *(POINTER(CModel), POINTER(CLayer), c_int64, POINTER(CStep), c_void_p, c_void_p, c_int, POINTER(CTimings)),
        )
        self.layer_attention = function(
            library.orca_llama_attention,
            None,
            *(POINTER(CModel), POINTER(CLayer), POINTER(CStep), c_void_p, c_void_p, c_void_p, c_int),
        )
        self.layer_mlp = function(
            library.orca_llama_mlp,
            None,
            *(POINTER(CModel), POINTER(CLayer), c_int64, c_void_p, c_void_p, c_void_p, c_int),
        )

    def linear(
        self, x: Tensor, weight: PackedMatrix, norm: Tensor | None = None, eps: float = 0.0, out: Tensor | None = None
    ) -> Tensor:
        """Return x [T, k] times the weights, [T, n] float32; with ``norm``, of x / rms(x) * norm.

        ``out``: where to, instead of new memory.
        """
        if out is None:
            out = x.new_empty(x.shape[0], weight.n)
        memory = Workspace()  # of this call alone: small, and these functions belong to all threads
        workspace = memory.address(self._linear_bytes(x.shape[0], weight.k))
        norm_address = None if norm is None else norm.data_ptr()
        packed = byref(weight.as_c())
        threads = threads_for(x.shape[0])
        self._linear(packed, x.data_ptr(), x.shape[0], norm_address, eps, out.data_ptr(), workspace, threads)
        return out

    def gather_rows(self, weight: PackedMatrix, rows: Tensor) -> Tensor:
        """Return some rows as float32, [len(rows), k]; rows int64."""
        out = torch.empty(rows.shape[0], weight.k)
        self._gather(byref(weight.as_c()), rows.data_ptr(), rows.shape[0], out.data_ptr())
        return out


def function(pointer: ctypes._NamedFuncPointer, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
    """Tell ctypes what a function takes and returns; the function."""
    pointer.restype = result
    pointer.argtypes = arguments
    return pointer


def load() -> NativeKernels:
    """Return this machine's kernels, compiled now if need be. Raises ``KernelsUnavailableError``."""
    kernels = _load()
    if isinstance(kernels, str):
        raise KernelsUnavailableError(kernels)
    return kernels


@functools.cache
def _load() -> NativeKernels | str:
    """The best kernels that can be had, or why there are none: tried once."""
    failures = []
    for chosen in instruction_sets(cpu_flags()):
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orca" / "kernels"
            kernels = NativeKernels(build(chosen, cache), chosen.name)
        except (BuildError, OSError, RuntimeError) as error:
            failures.append(f"{chosen.name}: {error}")
        else:
            kernels.failures = tuple(failures)
            return kernels
    return failures[0].partition(": ")[2]
