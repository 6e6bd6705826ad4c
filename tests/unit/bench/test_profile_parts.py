"""What `bench.profile_parts` tells of a small model: with how many threads its parts were computed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
import transformers

from bench.profile_parts import ModelProfiler
from kernels.native import library

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelProfiler]:
    """Of a model with small layers and a large vocabulary."""
    try:
        kernels = library.load()
    except library.KernelsUnavailableError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(kernels, "layers", kernels.layers)  # the profiler puts its own there
    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it leaves a thread behind
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    before = torch.get_num_threads()
    yield ModelProfiler(str(tmp_path))
    torch.set_num_threads(before)


def test_parts_tell_the_threads_that_the_kernels_chose(
    profiler: ModelProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    few, many = (profiler.profile(number, context=20, threads=2, repeats=3) for number in (1, 8))
    assert (few.threads, many.threads) == (1, 2), "not as many as were asked for, where rows are few"
    assert many.head_multiplies == 8 * 8192 * 64
    assert min(many.products_us, many.attention_us, many.other_us, many.head_us) > 0
