"""What each kind of file calls each parameter, and how it lays it out.

The names inside this project are those of Hugging Face's Llama without the leading ``model.``, for both families, plus
``embed_positions.weight``; matrices are [out, in]. Knows spelling and layout; opens no file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.model.config import Family

__all__ = ["Stored", "gguf_name", "hf_name"]

_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")

_HF_GPT2 = {"embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f"}
_HF_GPT2_LAYER = {
    "input_layernorm": "ln_1",
    "self_attn.q_proj": "attn.c_attn",
    "self_attn.k_proj": "attn.c_attn",
    "self_attn.v_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_GGUF = {
    "embed_tokens": "token_embd",
    "embed_positions": "position_embd",
    "norm": "output_norm",
    "lm_head": "output",
}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a parameter lies in a file."""

    name: str
    part: int = 0
    """Which of ``num_parts`` equal runs of rows it is: GPT files keep q, k and v as one matrix."""
    num_parts: int = 1
    transposed: bool = False
    """Kept as [in, out] (the Conv1D of Hugging Face's GPT-2)."""


def hf_name(family: Family, name: str) -> Stored:
    """Return where Hugging Face's safetensors keep ``name``, without the prefix of the whole model."""
    if family == "llama":
        return Stored(name)
    match = _LAYER.fullmatch(name)
    if match is None:
        return Stored(_rename(name, _HF_GPT2))
    layer, module, kind = match.groups()
    part, num_parts = _fused(module)
    transposed = kind == "weight" and not module.endswith("layernorm")
    return Stored(f"h.{layer}.{_HF_GPT2_LAYER[module]}.{kind}", part, num_parts, transposed)


def gguf_name(family: Family, name: str) -> Stored:
    """Return where GGUF files keep ``name``."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return Stored(_rename(name, _GGUF))
    layer, module, kind = match.groups()
    if family == "gpt2" and module in _QKV:
        return Stored(f"blk.{layer}.attn_qkv.{kind}", *_fused(module))
    return Stored(f"blk.{layer}.{_GGUF_LAYER[module]}.{kind}")


def _fused(module: str) -> tuple[int, int]:
    return (_QKV.index(module), len(_QKV)) if module in _QKV else (0, 1)


def _rename(name: str, names: dict[str, str]) -> str:
    module, _, kind = name.rpartition(".")
    return f"{names.get(module, module)}.{kind}"
