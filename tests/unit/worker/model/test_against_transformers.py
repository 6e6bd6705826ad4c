"""Every architecture, cut in every way, gives the logits of Hugging Face transformers in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch import Tensor

from kernels.native.library import UNIT
from shared.model.source import HfFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_COMMON: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 75,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_COMMON),
    "llama-tied-llama3": lambda: transformers.LlamaConfig(
        **{**_COMMON, "tie_word_embeddings": True}, rope_parameters=_LLAMA3
    ),
    "llama-biases-yarn": lambda: transformers.LlamaConfig(
        **_COMMON, attention_bias=True, mlp_bias=True, rope_parameters=_YARN
    ),
    "mistral-linear": lambda: transformers.MistralConfig(**_COMMON, sliding_window=None, rope_parameters=_LINEAR),
    "mistral-window": lambda: transformers.MistralConfig(**_COMMON, sliding_window=32),
    "qwen2": lambda: transformers.Qwen2Config(**_COMMON),
    "qwen3-tied": lambda: transformers.Qwen3Config(**{**_COMMON, "tie_word_embeddings": True}, head_dim=16),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=99, n_embd=64, n_layer=4, n_head=4, n_positions=64),
}


@pytest.fixture(scope="module", params=list(_CONFIGS))
def model(request: pytest.FixtureRequest, make_hf_model: Callable[[Any], tuple[Path, Any]]) -> tuple[Path, Any]:
    return make_hf_model(_CONFIGS[request.param]())


def _expected(reference: Any, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([ids])).logits[0]
    return logits


@pytest.mark.parametrize(
    ("num_stages", "tp_size", "block_size"), [(1, 1, UNIT), (1, 1, 4), (2, 1, UNIT), (3, 2, 4), (1, 4, UNIT)]
)
def test_mixed_iterations_give_the_same_logits(
    model: tuple[Path, Any],
    sequences: dict[str, list[int]],
    make_mesh: Callable[..., Any],
    num_stages: int,
    tp_size: int,
    block_size: int,
) -> None:
    """On the compiled operations where a block is of whole units, and on torch's."""
    folder, reference = model
    mesh = make_mesh(HfFolder(folder), num_stages, tp_size, block_size=block_size)
    for name, logits in mesh.run_mixed(sequences).items():
        expected = _expected(reference, sequences[name])
        assert expected.std() > 0.2
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize(("num_stages", "tp_size"), [(2, 2), (1, 3), (1, 6)])
def test_ranks_that_hold_different_numbers_of_heads(
    make_hf_model: Callable[[Any], tuple[Path, Any]],
    sequences: dict[str, list[int]],
    make_mesh: Callable[..., Any],
    num_stages: int,
    tp_size: int,
) -> None:
    sizes = _COMMON | {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 47}
    folder, reference = make_hf_model(transformers.Qwen3Config(**sizes, head_dim=16, attention_bias=True))
    mesh = make_mesh(HfFolder(folder), num_stages, tp_size, block_size=UNIT)
    for name, logits in mesh.run_mixed(sequences).items():
        torch.testing.assert_close(logits, _expected(reference, sequences[name]), atol=1e-4, rtol=0.0)
