"""How far bfloat16 and int8 may be from float32: the default model on real text, and small models of random weights.

On text it is the next token's distribution that counts: its mean Kullback-Leibler divergence, which is about what the
logarithm of perplexity loses on text that the model would write itself (bench/perplexity.py measures it on books), and
how often another token is the most probable one. Limits are about twice what is measured, far from what a wrong scale,
norm or head does. Random weights know no text: there it is the logits' own error, which the format's 8 bits explain.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import transformers

from kernels.native.library import UNIT, KernelsUnavailableError, NativeKernels, load
from shared.config import DEFAULT_MODEL
from shared.model.source import HfFolder
from shared.model.store import resolve
from shared.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from shared.model.source import ModelSource
    from tests.unit.worker.model.conftest import Mesh

TEXTS = Path(__file__).parents[4] / "bench" / "texts"
TOPOLOGIES = [(1, 1), (2, 1), (1, 2)]


class Numbers(NamedTuple):
    """A way to hold numbers, and how far from float32 it may be."""

    name: str
    max_divergence: float
    """Of one token's distribution, nats."""
    mean_divergence: float
    top1_agreement: float
    """Share of tokens whose most probable successor is the same."""

    def options(self) -> dict[str, Any]:
        if self.name == "bfloat16":
            return {"dtype": torch.bfloat16, "block_size": UNIT}
        return {"quantized": compiled()}


BFLOAT16 = Numbers("bfloat16", max_divergence=0.03, mean_divergence=0.002, top1_agreement=0.96)
INT8 = Numbers("int8", max_divergence=0.3, mean_divergence=0.02, top1_agreement=0.88)


def compiled() -> NativeKernels:
    try:
        return load()
    except KernelsUnavailableError as error:
        pytest.skip(str(error))


class Expected(NamedTuple):
    """Real text, and what float32 makes of it."""

    source: ModelSource
    sequences: dict[str, list[int]]
    log_probabilities: dict[str, Tensor]


@pytest.fixture(scope="module")
def default_model(make_mesh: Callable[..., Mesh]) -> Expected:
    source = resolve(DEFAULT_MODEL)
    tokenizer = load_tokenizer(source)
    alice, shakespeare = (
        tokenizer.encode(path.read_text(encoding="utf-8")[5_000:8_000]) for path in sorted(TEXTS.glob("*.txt"))
    )
    sequences = {"a": alice[:160], "b": shakespeare[:90], "c": alice[200:240]}
    logits = make_mesh(source, 1, 1, block_size=UNIT).run_mixed(sequences)
    return Expected(source, sequences, {name: rows.log_softmax(-1) for name, rows in logits.items()})


@pytest.mark.parametrize("numbers", [BFLOAT16, INT8], ids=lambda numbers: numbers.name)
@pytest.mark.parametrize(("num_stages", "tp_size"), TOPOLOGIES)
def test_the_default_model_on_text(
    default_model: Expected, make_mesh: Callable[..., Mesh], num_stages: int, tp_size: int, numbers: Numbers
) -> None:
    mesh = make_mesh(default_model.source, num_stages, tp_size, **numbers.options())
    divergences, agreements = [], []
    for name, logits in mesh.run_mixed(default_model.sequences).items():
        expected = default_model.log_probabilities[name]
        actual = logits.log_softmax(-1)
        divergences.append((expected.exp() * (expected - actual)).sum(-1))
        agreements.append(expected.argmax(-1) == actual.argmax(-1))
    divergence, agreement = torch.cat(divergences), torch.cat(agreements).float().mean()
    assert divergence.max() < numbers.max_divergence
    assert divergence.mean() < numbers.mean_divergence
    assert agreement >= numbers.top1_agreement


SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
SMALL: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, num_key_value_heads=2),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, num_key_value_heads=2),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=100, n_embd=64, n_layer=4, n_head=4, n_positions=64),
}


@pytest.mark.parametrize("block_size", [UNIT, 4])
@pytest.mark.parametrize(("num_stages", "tp_size"), TOPOLOGIES)
@pytest.mark.parametrize("name", SMALL)
def test_small_models_in_bfloat16(
    name: str,
    num_stages: int,
    tp_size: int,
    block_size: int,
    make_hf_model: Callable[[Any], tuple[Path, Any]],
    make_mesh: Callable[..., Mesh],
    sequences: dict[str, list[int]],
) -> None:
    """On the compiled operations where a block is of whole units, and on torch's."""
    source = HfFolder(make_hf_model(SMALL[name]())[0])
    expected = make_mesh(source, 1, 1).run_mixed(sequences)
    mesh = make_mesh(source, num_stages, tp_size, dtype=torch.bfloat16, block_size=block_size)
    for request, logits in mesh.run_mixed(sequences).items():
        error = (logits - expected[request]).norm(dim=1) / expected[request].norm(dim=1)
        assert error.max() < 0.2
        assert error.mean() < 0.05
