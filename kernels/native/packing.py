"""From float32 weights to packed ones; knows in which memory they come to lie, not their order there (pack.h)."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch

from kernels.memory import Arena
from kernels.native.library import PackedMatrix, function

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.native.library import NativeKernels

__all__ = ["Packer"]

_EXACT = 1e-3
"""Largest error, relative to the largest weight of its group, that rounding of scales alone explains."""


class Packer:
    """Packs the matrices of one model, side by side in memory that goes when they do."""

    def __init__(self, kernels: NativeKernels) -> None:
        library = kernels.library
        self.kernels = kernels
        self._groups, self._channels = Arena(), Arena()  # each read in order, layer by layer
        self._groups_bytes = function(library.orca_groups_bytes, c_int64, c_int64, c_int64)
        self._channels_bytes = function(library.orca_channels_bytes, c_int64, c_int64, c_int64)
        self._num_scales = function(library.orca_num_scales, c_int64, c_int64)
        self._pack_groups = function(
            library.orca_pack_groups, c_float, c_void_p, c_int64, c_int64, c_void_p, c_float, c_int
        )
        self._pack_channels = function(
            library.orca_pack_channels, None, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int
        )

    def pack(self, weight: Tensor) -> PackedMatrix:
        """Quantise [n, k] float32: to 8 bits, and to 4 as well where that loses nothing, as in a Q4_0 or Q4_1 file."""
        n, k = weight.shape
        threads = torch.get_num_threads()
        channels = torch.empty(self._channels_bytes(n, k), dtype=torch.uint8)
        scales = torch.empty(self._num_scales(n))
        self._pack_channels(weight.data_ptr(), n, k, channels.data_ptr(), scales.data_ptr(), threads)
        groups = torch.empty(self._groups_bytes(n, k), dtype=torch.uint8)
        error = self._pack_groups(weight.data_ptr(), n, k, groups.data_ptr(), _EXACT, threads)
        return PackedMatrix(
            n, k, self._groups.keep(groups) if error < _EXACT else None, self._channels.keep(channels), scales
        )
