"""The architecture that a GGUF file's header describes, as a :class:`~shared.model.config.ModelConfig`.

Knows the metadata keys of llama.cpp's llama (Llama, SmolLM, Mistral), qwen2, qwen3 and gpt2 architectures. Biases and
tied embeddings have no key: a tensor is there or it is not. No torch here.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from shared.errors import ModelError
from shared.model.config import DType, ModelConfig
from shared.model.gguf_metadata import GgufHeader, read_gguf_header
from shared.model.rope import LinearRope, RopeFactors, RopeScaling, YarnRope

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["config_of_header", "read_gguf_config"]

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")
_DTYPES: dict[int, DType] = {0: "float32", 1: "float16", 30: "bfloat16"}
"""Of the plain types; quantized weights are spread out to float16's precision at best."""


def read_gguf_config(path: Path) -> ModelConfig:
    """Return the architecture of the GGUF file at ``path``; ModelError when it cannot be run."""
    return config_of_header(read_gguf_header(path))


def config_of_header(header: GgufHeader) -> ModelConfig:
    """Return the architecture that ``header`` describes; ModelError when it cannot be run."""
    architecture = header.get("general.architecture", str)
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"{header.path}: architecture {architecture!r} is not supported. Supported are {', '.join(_ARCHITECTURES)}."
        )
    if header.get("split.count", int, 1) > 1:
        raise ModelError(f"{header.path} is one part of several: merge them with llama-gguf-split --merge.")
    if "token_embd.weight" not in header.tensors:
        raise ModelError(f"{header.path} has no token_embd.weight: it holds no complete model.")
    return _gpt2(header) if architecture == "gpt2" else _llama(header, architecture)


def _llama(header: GgufHeader, architecture: str) -> ModelConfig:
    keys = _Keys(header, architecture)
    if keys.get("expert_count", int, 0):
        raise ModelError(f"{header.path}: mixture-of-experts models are not supported.")
    num_heads = keys.uniform("attention.head_count")
    hidden_size = keys.get("embedding_length", int)
    head_dim = keys.get("attention.key_length", int, hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, int, head_dim) != head_dim:
            raise ModelError(f"{header.path}: {architecture}.{key} other than the head size is not supported.")
    context = keys.get("context_length", int)
    return ModelConfig(
        family="llama",
        architecture=architecture,
        vocab_size=header.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        num_layers=keys.get("block_count", int),
        num_heads=num_heads,
        num_kv_heads=keys.uniform("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=keys.uniform("feed_forward_length"),
        max_model_len=min(context, keys.get("attention.sliding_window", int, 0) or context),
        norm_eps=keys.get("attention.layer_norm_rms_epsilon", float),
        activation="silu",
        rope_theta=keys.get("rope.freq_base", float, 10_000.0),
        rope_scaling=_rope_scaling(keys, context),
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        o_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_up.bias" in header.tensors,
        qk_norm=architecture == "qwen3",
        tie_embeddings="output.weight" not in header.tensors,
        dtype=_dtype(header),
    )


def _gpt2(header: GgufHeader) -> ModelConfig:
    keys = _Keys(header, "gpt2")
    num_heads = keys.uniform("attention.head_count")
    hidden_size = keys.get("embedding_length", int)
    return ModelConfig(
        family="gpt2",
        architecture="gpt2",
        vocab_size=header.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        num_layers=keys.get("block_count", int),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // max(num_heads, 1),
        intermediate_size=keys.uniform("feed_forward_length", 4 * hidden_size),
        max_model_len=keys.get("context_length", int),
        norm_eps=keys.get("attention.layer_norm_epsilon", float, 1e-5),
        activation="gelu_tanh",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tie_embeddings="output.weight" not in header.tensors,
        dtype=_dtype(header),
    )


def _rope_scaling(keys: _Keys, context: int) -> RopeScaling | None:
    header = keys.header
    tensor = header.tensors.get("rope_freqs.weight")
    if tensor is not None:
        if tensor.type_id != 0 or len(tensor.shape) != 1 or tensor.num_bytes > 1 << 16:
            raise ModelError(f"{header.path}: rope_freqs.weight is not a short float32 vector: convert the model anew.")
        with header.path.open("rb") as file:
            file.seek(tensor.offset)
            return RopeFactors(struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.num_bytes)))
    factor = keys.get("rope.scaling.factor", float, keys.get("rope.scale_linear", float, 1.0))
    kind = keys.get("rope.scaling.type", str, "none" if factor == 1.0 else "linear")
    if not 0.0 < factor < float("inf"):
        raise ModelError(f"{header.path}: the RoPE scaling factor is {factor}, but must be above 0.")
    match kind:
        case "none":
            return None
        case "linear":
            return LinearRope(factor)
        case "yarn":
            return YarnRope(
                factor=factor,
                original_max_len=keys.get("rope.scaling.original_context_length", int, context),
                attention_factor=YarnRope.default_attention_factor(factor)
                * keys.get("rope.scaling.attn_factor", float, 1.0),
            )
        case _:
            raise ModelError(f"{header.path}: RoPE scaling {kind!r} is not supported, only none, linear and yarn.")


def _dtype(header: GgufHeader) -> DType:
    tensor = header.tensors.get("blk.0.attn_output.weight")
    return _DTYPES.get(tensor.type_id, "float16") if tensor is not None else "float16"


class _Keys:
    """Fields under one architecture's prefix."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.header = header
        self._prefix = architecture

    def get(self, key: str, kind: type[Any], default: object = None) -> Any:
        return self.header.get(f"{self._prefix}.{key}", kind, default)

    def uniform(self, key: str, default: int | None = None) -> int:
        """Return a number that may be written once or once per layer, if it is the same for all layers."""
        name = f"{self._prefix}.{key}"
        values = self.header.fields.get(name)
        if not isinstance(values, list):
            return self.header.get(name, int, default)
        if not values or not isinstance(values[0], int) or len(set(values)) > 1:
            raise ModelError(f"{self.header.path}: {name} differs between layers, which is not supported.")
        return values[0]
