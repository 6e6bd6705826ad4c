"""How many threads compute."""

from __future__ import annotations

import os

import pytest
import torch

from kernels.native.threads import threads_for

LAYER = 3_500_000


@pytest.mark.parametrize(
    ("cpus", "rows", "weights", "threads"),
    [
        (2, 1, LAYER, 1),
        (2, 3, LAYER, 1),
        (2, 4, LAYER, 2),
        (2, 512, LAYER, 2),
        (1, 1, LAYER, 1),
        (16, 1, LAYER, 3),
        (16, 3, LAYER, 10),
        (16, 64, LAYER, 16),
        (16, 1, 100 * LAYER, 15),
        (16, 64, 1000, 1),
    ],
)
def test_few_rows_leave_a_cpu_and_little_work_takes_few(
    cpus: int, rows: int, weights: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: cpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cpus)))
    assert threads_for(rows, weights) == threads


def test_no_more_than_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    assert threads_for(1, 100 * LAYER) == threads_for(64, LAYER) == 2
