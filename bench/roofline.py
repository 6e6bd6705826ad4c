"""What this machine can do at best: how fast it reads memory, and how fast the kernels multiply what is in a cache."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.memory import huge_pages
from kernels.native import library
from kernels.native.packing import Packer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Roofline", "best_seconds", "measure_roofline"]

_READ_BYTES = 256 << 20
_REPEATS = 8


@dataclass(frozen=True, slots=True)
class Roofline:
    """The best of some runs, with one number for each number of threads that was asked for."""

    threads: tuple[int, ...]
    read_bytes_s: tuple[float, ...]
    """Memory in huge pages, far larger than any cache, read once from end to end."""
    multiplies_s: tuple[float, ...]
    """Multiply-adds of a product of 256 rows with an 8-bit matrix of 0.9 MB, by the kernels that serve."""

    def at_best_us(self, threads: int, *, num_bytes: float = 0, multiplies: float = 0) -> float:
        """Return the time that so much work takes at least, microseconds: the roofline model (Williams et al. 2009)."""
        place = self.threads.index(threads)
        return 1e6 * max(num_bytes / self.read_bytes_s[place], multiplies / self.multiplies_s[place])


def measure_roofline(threads: tuple[int, ...]) -> Roofline:
    """Measure; takes some seconds."""
    kernels = library.load()
    memory = huge_pages(_READ_BYTES)
    memory.fill_(1)
    words = memory.view(torch.int64)
    rows, n, k = 256, 1536, 576  # a layer's gate and up projection of the default model
    matrix, x = Packer(kernels).pack(torch.randn(n, k)), torch.randn(rows, k)
    reads, multiplies = [], []
    before = torch.get_num_threads()
    for number in threads:
        torch.set_num_threads(number)
        reads.append(_READ_BYTES / best_seconds(words.sum, _REPEATS))
        multiplies.append(rows * n * k / best_seconds(lambda: kernels.linear(x, matrix), 10 * _REPEATS))
    torch.set_num_threads(before)
    return Roofline(threads, tuple(reads), tuple(multiplies))


def best_seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the quickest of some calls, seconds."""
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
