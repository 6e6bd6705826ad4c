"""The collectives over a real gloo group, in two processes."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import torch

from services.worker.tensor_parallel import SingleRank

if TYPE_CHECKING:
    from pathlib import Path

_PROGRAM = """
import sys, torch, torch.distributed as dist
from services.worker.tensor_parallel import DistributedTensorParallel
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
tp = DistributedTensorParallel(dist.new_group([0, 1]))
assert (tp.rank, tp.size) == (rank, 2)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    with torch.inference_mode():
        mine = torch.full((3, 2), rank + 1.0, dtype=dtype)
        assert tp.all_reduce(mine) is mine and mine.tolist() == [[3.0, 3.0]] * 3
        whole = tp.gather_last_dim(torch.tensor([[1, 2], [3, 4]], dtype=dtype) + 10 * rank)
        assert whole.tolist() == [[1, 2, 11, 12], [3, 4, 13, 14]], whole
dist.destroy_process_group()
"""


def test_two_processes(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 0, errors


def test_single_rank_changes_nothing() -> None:
    x = torch.ones(2, 3)
    assert SingleRank().all_reduce(x) is x
    assert SingleRank().gather_last_dim(x) is x
