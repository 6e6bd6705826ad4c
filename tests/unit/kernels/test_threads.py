"""How many threads compute."""

from __future__ import annotations

import os

import pytest
import torch

from kernels.native.threads import threads_for


@pytest.mark.parametrize(
    ("cpus", "rows", "threads"), [(2, 1, 1), (2, 3, 1), (2, 4, 2), (2, 512, 2), (1, 1, 1), (16, 1, 15), (16, 64, 16)]
)
def test_few_rows_leave_a_cpu(cpus: int, rows: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: cpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cpus)))
    assert threads_for(rows) == threads


def test_no_more_than_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    assert threads_for(1) == threads_for(64) == 2
