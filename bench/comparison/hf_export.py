"""A Llama model as a Hugging Face folder in bfloat16, from its GGUF file: what vLLM reads.

The weights are those of the file, dequantized by orca's own reader, so that all systems run the same model; the
tokenizer is as transformers reads it from the file.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
import transformers
from safetensors.torch import save_file

from services.worker.model.gguf_weights import GgufWeights
from shared.errors import ModelError
from shared.model.config import ModelConfig

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["export_bfloat16", "parameter_shapes"]

_CONFIG = "config.json"


def export_bfloat16(gguf: Path, folder: Path) -> None:
    """Write the folder unless it is there. Raises ``ModelError`` for models that are not plain Llamas."""
    if (folder / _CONFIG).is_file():
        return
    config = ModelConfig.from_gguf(gguf)
    shapes = parameter_shapes(config)
    source = GgufWeights(gguf, config)
    weights = {
        f"model.{name}": source.read(name, shape, range(shape[0]), range(shape[1]) if len(shape) > 1 else None)
        .to(torch.bfloat16)
        .contiguous()
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    fields = _hf_config(config) | {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    # Last, for it tells that the folder is whole.
    (folder / _CONFIG).write_text(json.dumps(fields, indent=2), encoding="utf-8")


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the parameters of a Llama without biases and with a tied head; vectors and matrices [out, in]."""
    if config.architecture != "llama" or config.rope_scaling or not config.tie_embeddings:
        raise ModelError(f"only plain Llamas with tied embeddings are exported, not {config.architecture}")
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "norm.weight": (hidden,),
    }
    for layer in range(config.num_layers):
        of_layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (q_size, hidden),
            "self_attn.k_proj": (kv_size, hidden),
            "self_attn.v_proj": (kv_size, hidden),
            "self_attn.o_proj": (hidden, q_size),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes


def _hf_config(config: ModelConfig) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
