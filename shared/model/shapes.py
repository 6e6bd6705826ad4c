"""Shapes of published models and of tiny ones for tests: what ``random:<shape>`` can name.

Sources: the models' own configuration files; the GPT-3 sizes as ORCA (OSDI '22) §6 evaluates them, with heads of 128
as in GPT-3, since the paper gives only layers and hidden size.
"""

from __future__ import annotations

from shared.errors import ModelNotFoundError
from shared.model.config import ModelConfig

__all__ = ["SHAPE_NAMES", "named_shape"]

_GPT_VOCAB_SIZE = 50257


def _gpt(name: str, *, layers: int, hidden: int, heads: int, context: int, vocab: int = _GPT_VOCAB_SIZE) -> ModelConfig:
    return ModelConfig(
        family="gpt2",
        architecture=name,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=4 * hidden,
        max_model_len=context,
        norm_eps=1e-5,
        activation="gelu_tanh",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tie_embeddings=True,
        dtype="float16" if hidden > 2048 else "float32",
    )


def _llama(
    name: str,
    *,
    vocab: int,
    hidden: int,
    layers: int,
    heads: tuple[int, int],
    intermediate: int,
    context: int,
    theta: float,
    head_dim: int | None = None,
    eps: float = 1e-5,
    tied: bool = False,
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> ModelConfig:
    num_heads, num_kv_heads = heads
    return ModelConfig(
        family="llama",
        architecture=name,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim or hidden // num_heads,
        intermediate_size=intermediate,
        max_model_len=context,
        norm_eps=eps,
        activation="silu",
        rope_theta=theta,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        tie_embeddings=tied,
        dtype="bfloat16" if hidden > 256 else "float32",
    )


def _tiny_llama(name: str, layers: int) -> ModelConfig:
    return _llama(
        name, vocab=260, hidden=64, layers=layers, heads=(8, 4), intermediate=96, context=2048, theta=10_000.0
    )


_SHAPES = (
    _tiny_llama("tiny-llama", 6),
    _tiny_llama("tiny-llama-30l", 30),
    _gpt("tiny-gpt2", layers=6, hidden=64, heads=4, context=2048, vocab=260),
    _gpt("gpt2", layers=12, hidden=768, heads=12, context=1024),
    _gpt("gpt2-xl", layers=48, hidden=1600, heads=25, context=1024),
    _gpt("gpt3-13b", layers=40, hidden=5120, heads=40, context=2048),
    _gpt("gpt3-101b", layers=80, hidden=10240, heads=80, context=2048),
    _gpt("gpt3-175b", layers=96, hidden=12288, heads=96, context=2048),
    _gpt("gpt3-341b", layers=120, hidden=15360, heads=120, context=2048),
    _llama(
        "smollm2-135m",
        vocab=49152,
        hidden=576,
        layers=30,
        heads=(9, 3),
        intermediate=1536,
        context=8192,
        theta=1e5,
        tied=True,
    ),
    _llama(
        "llama3-8b",
        vocab=128256,
        hidden=4096,
        layers=32,
        heads=(32, 8),
        intermediate=14336,
        context=8192,
        theta=5e5,
    ),
    _llama(
        "llama3-70b",
        vocab=128256,
        hidden=8192,
        layers=80,
        heads=(64, 8),
        intermediate=28672,
        context=8192,
        theta=5e5,
    ),
    _llama(
        "mistral-7b",
        vocab=32768,
        hidden=4096,
        layers=32,
        heads=(32, 8),
        intermediate=14336,
        context=32768,
        theta=1e6,
    ),
    _llama(
        "qwen2.5-7b",
        vocab=152064,
        hidden=3584,
        layers=28,
        heads=(28, 4),
        intermediate=18944,
        context=32768,
        theta=1e6,
        eps=1e-6,
        qkv_bias=True,
    ),
    _llama(
        "qwen3-8b",
        vocab=151936,
        hidden=4096,
        layers=36,
        heads=(32, 8),
        head_dim=128,
        intermediate=12288,
        context=40960,
        theta=1e6,
        eps=1e-6,
        qk_norm=True,
    ),
)
_BY_NAME = {shape.architecture: shape for shape in _SHAPES}

SHAPE_NAMES: tuple[str, ...] = tuple(_BY_NAME)
"""Names that :func:`named_shape` knows."""


def named_shape(name: str) -> ModelConfig:
    """Return the architecture called ``name``; ModelNotFoundError lists the known ones."""
    config = _BY_NAME.get(name)
    if config is None:
        raise ModelNotFoundError(f"There is no model shape {name!r}. Known shapes: {', '.join(SHAPE_NAMES)}.")
    return config
