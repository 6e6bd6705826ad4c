"""How many threads compute: few rows leave a CPU to the control plane.

A team's threads meet after each operation, and one that has lost its CPU holds up all others. Gateway, scheduler and
the worker's event loop have nearly as much to do for one request as for many.
"""

from __future__ import annotations

import os

import torch

__all__ = ["threads_for"]

_FEW_ROWS = 3
"""For so many, one thread was quicker than two on two CPUs, in a running mesh (docs/performance.md)."""


def threads_for(num_rows: int) -> int:
    """Return how many threads compute an iteration of so many rows: torch's number at most.

    The same for its layers and its head: OpenMP ends the threads that a smaller team does not need.
    """
    threads = torch.get_num_threads()
    if num_rows > _FEW_ROWS:
        return threads
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(threads, max(1, num_cpus - 1))
