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
_WEIGHTS_PER_THREAD = 1 << 20
"""Times rows; less is not worth a thread."""


def threads_for(num_rows: int, num_weights: int) -> int:
    """Return how many threads multiply some rows by ``num_weights`` weights before they meet; at most torch's."""
    threads = min(torch.get_num_threads(), max(1, num_rows * num_weights // _WEIGHTS_PER_THREAD))
    return threads if num_rows > _FEW_ROWS else min(threads, max(1, len(os.sched_getaffinity(0)) - 1))
