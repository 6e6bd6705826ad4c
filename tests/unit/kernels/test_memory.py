from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch

from kernels.memory import Arena, huge_pages


def test_fresh_memory_is_zero_and_aligned() -> None:
    memory = huge_pages(5000)
    assert memory.shape == (5000,)
    assert memory.data_ptr() % (2 << 20) == 0
    assert not memory.any()
    memory.view(torch.float32).fill_(1.5)
    assert memory.view(torch.float32).sum() == 1.5 * 1250


def test_no_memory_at_all() -> None:
    assert huge_pages(0).numel() == 0


@pytest.mark.parametrize("num_bytes", [1 << 60, 1 << 70])
def test_too_much_is_refused(num_bytes: int) -> None:
    with pytest.raises(MemoryError, match=f"{num_bytes} bytes cannot be had"):
        huge_pages(num_bytes)


def test_an_arena_keeps_copies_side_by_side() -> None:
    arena = Arena()
    data = [torch.full((size,), value, dtype=torch.uint8) for value, size in enumerate((1000, 64, 1, 20 << 20, 7), 1)]
    kept = [arena.keep(tensor) for tensor in data]
    for original, copy in zip(data, kept, strict=True):
        assert copy.data_ptr() % 64 == 0
        assert torch.equal(original, copy)
        assert copy.untyped_storage().nbytes() == original.nbytes
    assert kept[1].data_ptr() - kept[0].data_ptr() == 1024
    # What does not fit the chunk gets one of its own.
    assert abs(kept[3].data_ptr() - kept[2].data_ptr()) > 1 << 20


def test_what_is_kept_outlives_the_arena() -> None:
    arena = Arena()
    kept = arena.keep(torch.arange(100, dtype=torch.uint8))
    del arena
    gc.collect()
    assert kept.tolist() == list(range(100))


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system knows no huge pages")
def test_huge_pages_are_asked_for() -> None:
    memory = huge_pages(8 << 20)
    start, is_ours, flags = memory.data_ptr(), False, ""
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        bounds = line.partition(" ")[0].split("-")
        if len(bounds) == 2:
            is_ours = int(bounds[0], 16) <= start < int(bounds[1], 16)
        elif is_ours and line.startswith("VmFlags:"):
            flags = line
    assert " hg" in flags
