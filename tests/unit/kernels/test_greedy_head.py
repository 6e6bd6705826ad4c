from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kernels.native.head import GreedyHead
from kernels.native.packing import Packer

if TYPE_CHECKING:
    from kernels.native.library import NativeKernels

EPS = 1e-5


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 33, 97, 200])
@pytest.mark.parametrize(("n", "k"), [(1000, 64), (16, 96), (33, 576), (2048, 128)])
def test_tokens_are_those_of_the_logits(kernels: NativeKernels, n: int, k: int, num_rows: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(n * k + num_rows)
    vocab = Packer(kernels).pack(torch.randn(n, k, generator=generator))
    norm = torch.rand(k, generator=generator) + 0.5
    hidden = torch.randn(num_rows + 5, k, generator=generator)
    rows = torch.randperm(num_rows + 5, generator=generator)[:num_rows]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tokens, invalid = GreedyHead(kernels, vocab, norm, EPS)(hidden, rows)
        logits = kernels.linear(hidden[rows], vocab, norm, EPS)
    finally:
        torch.set_num_threads(before)
    assert tokens.tolist() == logits.numpy().argmax(axis=-1).tolist()
    assert invalid == []


def test_the_first_of_equals(kernels: NativeKernels) -> None:
    row = torch.randn(64)
    weights = torch.zeros(3000, 64)
    weights[[41, 1040, 2999]] = row
    head = GreedyHead(kernels, Packer(kernels).pack(weights), torch.ones(64), EPS)
    tokens, invalid = head(torch.stack([row, -row]), torch.tensor([0, 1, 0]))
    assert tokens.tolist() == [41, 0, 41]
    assert invalid == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_told(kernels: NativeKernels, bad: float) -> None:
    hidden = torch.randn(4, 64)
    hidden[2, 5] = bad
    head = GreedyHead(kernels, Packer(kernels).pack(torch.randn(100, 64)), torch.ones(64), EPS)
    tokens, invalid = head(hidden, torch.tensor([3, 2, 1]))
    assert invalid == [1]
    assert tokens[1] == 0
