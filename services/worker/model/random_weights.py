"""Random weights that are a pure function of seed, parameter name and element.

So every topology holds parts of the same matrices, and a rank makes its own part without the rest, on its own device.
Values are uniform: matrices with variance 1 / columns, so that random models of every size react to their input; norms
around 1 and biases around 0 with a deviation of 0.02.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

__all__ = ["RandomWeights"]

_CHUNK = 1 << 18
"""Elements made at a time: as many as stay in a CPU's cache, on GPUs as many as keep it busy."""
_GPU_CHUNK = 1 << 26
_DEVIATION = 0.02


class RandomWeights:
    """A source without files, in which every name exists except a redundant head."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device

    def has(self, name: str) -> bool:
        """Return whether a file would have that tensor: no, only what is asked for is made."""
        del name
        return False

    def read(self, name: str, shape: tuple[int, ...], rows: range, columns: range | None = None) -> Tensor:
        """Return a part of the parameter ``name``, float32."""
        if len(shape) == 1:
            spread = self._uniform(name, range(1), rows)[0].mul_(_DEVIATION * math.sqrt(3.0))
            return spread.add_(1.0) if "norm" in name and name.endswith(".weight") else spread
        return self._uniform(name, rows, columns or range(shape[1])).mul_(math.sqrt(3.0 / shape[1]))

    def _uniform(self, name: str, rows: range, columns: range) -> Tensor:
        """Return numbers of [-1, 1), [rows, columns]."""
        row_keys = torch.from_numpy(_row_keys(self._seed, name, rows)).to(self._device)
        steps = torch.arange(columns.start, columns.stop, dtype=torch.int64, device=self._device)
        column_keys = _wrapped(steps * 0x9E3779B1)
        out = torch.empty((len(rows), len(columns)), dtype=torch.float32, device=self._device)
        size = max(1, (_CHUNK if self._device.type == "cpu" else _GPU_CHUNK) // max(len(columns), 1))
        for start in range(0, len(rows), size):
            keys = row_keys[start : start + size, None] + column_keys
            out[start : start + size] = _mix(keys)
        return out.mul_(2.0**-31)


def _row_keys(seed: int, name: str, rows: range) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return one 32-bit key per row, by SplitMix64 (Steele et al. 2014) from a hash of seed and name."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    base = np.frombuffer(digest, dtype=np.uint64)
    z = base + np.arange(rows.start + 1, rows.stop + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys: np.ndarray[tuple[int], np.dtype[np.int32]] = (z >> np.uint64(32)).astype(np.uint32).view(np.int32)
    return keys


def _wrapped(x: Tensor) -> Tensor:
    """Return the low 32 bits of int64 values, as int32."""
    low = x & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)


def _mix(x: Tensor) -> Tensor:
    """Scatter int32 keys in place over all 32 bits (Wellons' lowbias32); products wrap around."""
    for shift, mask, factor in ((16, 0xFFFF, 0x7FEB352D), (15, 0x1FFFF, -0x7B935975)):
        x ^= (x >> shift) & mask  # the mask makes the shift a logical one
        x *= factor
    x ^= (x >> 16) & 0xFFFF
    return x
