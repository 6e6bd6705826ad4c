"""Quantised layers against the model in float32, at every topology and for every member of the family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from kernels.native.library import KernelsUnavailableError, NativeKernels, load
from services.worker.model.linear import LogitsMemory
from services.worker.model.quantized import quantization_fault
from shared.model.config import load as load_config
from shared.model.source import HfFolder, RandomModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.unit.worker.model.conftest import Mesh

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES),
}


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    try:
        return load()
    except KernelsUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def restore_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("num_stages", "tp_size"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_logits_are_near_those_in_float32(
    kernels: NativeKernels,
    name: str,
    num_stages: int,
    tp_size: int,
    make_hf_model: Callable[[Any], tuple[Path, Any]],
    make_mesh: Callable[..., Mesh],
    sequences: dict[str, list[int]],
) -> None:
    folder, model = make_hf_model(CONFIGS[name])
    mesh = make_mesh(HfFolder(folder), num_stages, tp_size, quantized=kernels)
    for request, logits in mesh.run_mixed(sequences).items():
        with torch.inference_mode():
            expected = model(torch.tensor([sequences[request]])).logits[0]
        error = (logits - expected).norm(dim=1) / expected.norm(dim=1)
        assert error.max() < 0.3  # such small sharp models make much of 8 bits; wrong ones are off by 1 and more
        assert error.mean() < 0.1


def test_a_token_gets_the_same_whatever_else_is_in_the_batch(
    kernels: NativeKernels,
    make_hf_model: Callable[[Any], tuple[Path, Any]],
    make_mesh: Callable[..., Mesh],
    sequences: dict[str, list[int]],
) -> None:
    folder, _ = make_hf_model(CONFIGS["llama"])
    mixed = make_mesh(HfFolder(folder), 1, 1, quantized=kernels).run_mixed(sequences)
    for name, tokens in sequences.items():
        alone = make_mesh(HfFolder(folder), 1, 1, quantized=kernels).step({name: tokens})[name]
        assert torch.equal(alone, mixed[name])


@pytest.mark.parametrize("hidden_size", [64, 32, 128])  # attention's 64 are as many, more, fewer
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_many_tokens_give_the_same_by_blocks_of_rows(
    kernels: NativeKernels,
    num_threads: int,
    hidden_size: int,
    make_hf_model: Callable[[Any], tuple[Path, Any]],
    make_mesh: Callable[..., Mesh],
    restore_threads: None,
) -> None:
    del restore_threads
    folder, _ = make_hf_model(transformers.Qwen3Config(**SIZES | {"hidden_size": hidden_size}))
    lengths = (100, 1, 5, 64, 150, 33, 200, 97)
    requests = {str(length): [(7 * place + length) % 100 for place in range(length)] for length in lengths}
    torch.set_num_threads(16)  # too many to share so few tokens by rows: all of them share each operation
    by_operations = make_mesh(HfFolder(folder), 1, 1, quantized=kernels).step(requests)
    torch.set_num_threads(num_threads)
    by_rows = make_mesh(HfFolder(folder), 1, 1, quantized=kernels).step(requests)
    for name in requests:
        assert torch.equal(by_rows[name], by_operations[name])


@pytest.mark.parametrize(
    ("shape", "tp_size", "block_size", "reason"),
    [
        ("tiny-gpt2", 1, 16, "gpt2"),
        ("tiny-llama", 1, 16, "heads of 8"),
        ("llama3-8b", 1, 20, "--block-size"),
        ("llama3-8b", 1, 16, None),
    ],
)
def test_what_cannot_be_run_so_is_known(shape: str, tp_size: int, block_size: int, reason: str | None) -> None:
    fault = quantization_fault(load_config(RandomModel(shape, 0)), tp_size=tp_size, block_size=block_size)
    assert fault is None if reason is None else reason in str(fault)


def test_logits_are_made_in_the_same_memory_again() -> None:
    memory = LogitsMemory(5)
    first = memory.rows(3)
    assert first.shape == (3, 5)
    assert memory.rows(2).data_ptr() == first.data_ptr()
    grown = memory.rows(4)
    assert grown.shape == (4, 5)
    assert memory.rows(6).data_ptr() == grown.data_ptr()  # it has doubled
    assert memory.rows(0).shape == (0, 5)
