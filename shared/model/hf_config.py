"""``config.json`` of a Hugging Face folder, turned into a :class:`~shared.model.config.ModelConfig`.

Knows the spelling of Llama, Mistral, Qwen2, Qwen3 and GPT-2, old and new; refuses what it does not know rather than
run a model wrongly. No torch, no transformers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar, cast

from shared.errors import ModelError
from shared.model.config import Activation, DType, ModelConfig
from shared.model.rope import LinearRope, Llama3Rope, RopeScaling, YarnRope

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_hf_config"]

_T = TypeVar("_T")

_LLAMA_LIKE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ARCHITECTURES = (*_LLAMA_LIKE, "GPT2LMHeadModel")
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_DTYPES = ("float32", "float16", "bfloat16")
_MAX_BYTES = 16 << 20


def read_hf_config(folder: Path) -> ModelConfig:
    """Return the architecture that ``folder / "config.json"`` describes.

    Raises ModelError, saying what to do, when the file is missing, damaged or asks for what is not supported.
    """
    config = _Keys(_read_json(folder / "config.json"), folder)
    names = config.get("architectures", list, [])
    architecture = names[0] if names else None
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"{folder}: architecture {architecture!r} is not supported. Supported are {', '.join(_ARCHITECTURES)}."
        )
    if config.has("quantization_config"):
        method = config.get("quantization_config", dict).get("quant_method")
        raise ModelError(
            f"{folder}: the weights are quantized ({method}), which is not supported for Hugging Face folders. "
            "Use the original weights, or a GGUF file of the model."
        )
    return _gpt2(config) if architecture == "GPT2LMHeadModel" else _llama(config, architecture)


def _llama(config: _Keys, architecture: str) -> ModelConfig:
    qwen2 = architecture == "Qwen2ForCausalLM"
    attention_bias = architecture != "MistralForCausalLM" and config.get("attention_bias", bool, default=False)
    num_heads = config.get("num_attention_heads", int)
    hidden_size = config.get("hidden_size", int)
    context = config.get("max_position_embeddings", int)
    theta, scaling = _rope(config, context)
    default_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden_size // max(num_heads, 1)
    return ModelConfig(
        family="llama",
        architecture=architecture,
        vocab_size=config.get("vocab_size", int),
        hidden_size=hidden_size,
        num_layers=config.get("num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads", int, num_heads),
        head_dim=config.get("head_dim", int, default_head_dim),
        intermediate_size=config.get("intermediate_size", int),
        max_model_len=min(context, _sliding_window(config, architecture, context)),
        norm_eps=config.get("rms_norm_eps", float, 1e-6),
        activation=_activation(config, "hidden_act", "silu", "silu"),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=qwen2 or attention_bias,
        o_bias=not qwen2 and attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and config.get("mlp_bias", bool, default=False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        tie_embeddings=config.get("tie_word_embeddings", bool, default=False),
        dtype=_dtype(config),
    )


def _gpt2(config: _Keys) -> ModelConfig:
    for name, usual in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if config.get(name, bool, usual) is not usual:
            raise ModelError(f"{config.folder}: GPT-2 with {name}={not usual} is not supported.")
    num_heads = config.get("n_head", int)
    hidden_size = config.get("n_embd", int)
    return ModelConfig(
        family="gpt2",
        architecture="GPT2LMHeadModel",
        vocab_size=config.get("vocab_size", int),
        hidden_size=hidden_size,
        num_layers=config.get("n_layer", int),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // max(num_heads, 1),
        intermediate_size=config.get("n_inner", int, 4 * hidden_size),
        max_model_len=config.get("n_positions", int),
        norm_eps=config.get("layer_norm_epsilon", float, 1e-5),
        activation=_activation(config, "activation_function", "gelu_new", "gelu_tanh"),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tie_embeddings=config.get("tie_word_embeddings", bool, default=True),
        dtype=_dtype(config),
    )


def _activation(config: _Keys, key: str, default: str, wanted: Activation) -> Activation:
    name = config.get(key, str, default)
    if _ACTIVATIONS.get(name) != wanted:
        known = ", ".join(spelling for spelling, activation in _ACTIVATIONS.items() if activation == wanted)
        raise ModelError(f"{config.folder}: {key} {name!r} is not supported with this architecture, only {known}.")
    return wanted


def _dtype(config: _Keys) -> DType:
    name = config.get("dtype", str, config.get("torch_dtype", str, "float32"))
    if name not in _DTYPES:
        raise ModelError(f"{config.folder}: weights of type {name!r} are not supported, only {', '.join(_DTYPES)}.")
    return cast("DType", name)


def _sliding_window(config: _Keys, architecture: str, context: int) -> int:
    """Return how far any layer sees, tokens; ``context`` when all layers see everything."""
    windowed = "sliding_attention" in config.get("layer_types", list, [])
    match architecture:
        case "MistralForCausalLM":
            windowed = True
        case "Qwen2ForCausalLM" | "Qwen3ForCausalLM" if config.get("use_sliding_window", bool, default=False):
            first = config.get("max_window_layers", int, 28)
            windowed = windowed or first < config.get("num_hidden_layers", int)
        case _:
            pass
    return config.get("sliding_window", int, context) if windowed else context


def _rope(config: _Keys, context: int) -> tuple[float, RopeScaling | None]:
    """Return base and scaling from ``rope_parameters`` (new) or ``rope_theta`` and ``rope_scaling`` (old)."""
    table = config.get("rope_parameters", dict, config.get("rope_scaling", dict, {}))
    if any(isinstance(value, dict) for value in table.values()):
        raise ModelError(f"{config.folder}: RoPE that differs between layers is not supported.")
    rope = _Keys(table, config.folder, prefix="rope parameter ")
    theta = rope.get("rope_theta", float, config.get("rope_theta", float, 10_000.0))
    if rope.get("partial_rotary_factor", float, config.get("partial_rotary_factor", float, 1.0)) != 1.0:
        raise ModelError(f"{config.folder}: partial rotary embeddings are not supported.")
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    match kind:
        case "default":
            return theta, None
        case "linear":
            return theta, LinearRope(rope.positive("factor"))
        case "llama3":
            return theta, Llama3Rope(
                factor=rope.positive("factor"),
                low_freq_factor=rope.positive("low_freq_factor"),
                high_freq_factor=rope.positive("high_freq_factor"),
                original_max_len=rope.get("original_max_position_embeddings", int, context),
            )
        case "yarn":
            if rope.has("mscale") or rope.has("mscale_all_dim"):
                raise ModelError(f"{config.folder}: YaRN with mscale is not supported.")
            factor = rope.positive("factor")
            return theta, YarnRope(
                factor=factor,
                original_max_len=rope.get("original_max_position_embeddings", int, context),
                attention_factor=rope.positive("attention_factor", YarnRope.default_attention_factor(factor)),
                beta_fast=rope.positive("beta_fast", 32.0),
                beta_slow=rope.positive("beta_slow", 1.0),
                truncate=rope.get("truncate", bool, default=True),
            )
        case _:
            raise ModelError(
                f"{config.folder}: RoPE scaling {kind!r} is not supported, only default, linear, llama3 and yarn."
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ModelError(f"{path} is larger than {_MAX_BYTES >> 20} MiB, so it is not a model's configuration.")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing: point --model at a folder that was downloaded completely.") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}): fetch the model again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object: fetch the model again.")
    return value


class _Keys:
    """A JSON object whose values are read by key and expected type; null counts as absent."""

    def __init__(self, values: dict[str, Any], folder: Path, prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self.folder = folder

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def get(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.folder}/config.json has no {self._prefix}{key!r}: fetch the model again.")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 64:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(
                f"{self.folder}/config.json: {self._prefix}{key} is {value!r}, which is no {kind.__name__}: "
                "fetch the model again."
            )
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.get(key, float, default)
        if not 0.0 < value < float("inf"):
            raise ModelError(f"{self.folder}/config.json: {self._prefix}{key} is {value}, but must be above 0.")
        return value
