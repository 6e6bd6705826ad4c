"""The Llama family: RMSNorm, rotary positions, grouped-query attention, gated MLP.

Llama, SmolLM2 and Mistral as they are; Qwen2 adds biases to q, k and v; Qwen3 normalises each head of q and k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

import kernels
from services.worker.model.attention import attend
from services.worker.model.parameters import Parameters, Rows
from services.worker.model.partition import heads_of_rank, intermediate_of_rank, kv_heads_of_rank
from shared.model.rope import attention_factor, inverse_frequencies

if TYPE_CHECKING:
    from torch import Tensor

    from services.worker.batch import ForwardBatch
    from services.worker.kv_cache import KvCache, LayerKv
    from services.worker.model.linear import ColumnParallelLinear, RowParallelLinear
    from shared.model.config import ModelConfig

__all__ = ["LlamaBlock", "LlamaDecoder", "RmsNorm"]


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Root-mean-square normalisation over the last axis."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return x normalised; x [..., n]."""
        return kernels.rms_norm(x, self.weight, self.eps)

    @classmethod
    def load(cls, parameters: Parameters, name: str, size: int | None = None) -> RmsNorm:
        """Read the norm called ``name``; of ``size`` elements, or the hidden size."""
        config = parameters.config
        return cls(parameters.vector(f"{name}.weight", size or config.hidden_size), config.norm_eps)


class Rotation(NamedTuple):
    """How far the heads of each token are turned: cosines and sines, [T, D / 2] float32 each."""

    cos: Tensor
    sin: Tensor


class LlamaBlock:
    """One layer, of one rank."""

    def __init__(self, parameters: Parameters, index: int) -> None:
        config, tp = parameters.config, parameters.tp
        layer, hidden, dim = f"layers.{index}", config.hidden_size, config.head_dim
        heads = _units(heads_of_rank(config, tp.rank, tp.size), dim)
        kv_heads = _units(kv_heads_of_rank(config, tp.rank, tp.size), dim)
        inner = intermediate_of_rank(config, tp.rank, tp.size)
        inner_size, q_size, kv_size = config.intermediate_size, config.num_heads * dim, config.num_kv_heads * dim

        self._head_dim = dim
        self._qkv_sizes = [len(heads), len(kv_heads), len(kv_heads)]
        self._input_norm = RmsNorm.load(parameters, f"{layer}.input_layernorm")
        self._qkv: ColumnParallelLinear = parameters.column_parallel(
            [
                Rows(f"{layer}.self_attn.q_proj", q_size, heads),
                Rows(f"{layer}.self_attn.k_proj", kv_size, kv_heads),
                Rows(f"{layer}.self_attn.v_proj", kv_size, kv_heads),
            ],
            hidden,
            bias=config.qkv_bias,
        )
        self._q_norm = RmsNorm.load(parameters, f"{layer}.self_attn.q_norm", dim) if config.qk_norm else None
        self._k_norm = RmsNorm.load(parameters, f"{layer}.self_attn.k_norm", dim) if config.qk_norm else None
        self._o: RowParallelLinear = parameters.row_parallel(
            f"{layer}.self_attn.o_proj", (hidden, q_size), heads, bias=config.o_bias
        )
        self._post_norm = RmsNorm.load(parameters, f"{layer}.post_attention_layernorm")
        self._gate_up: ColumnParallelLinear = parameters.column_parallel(
            [
                Rows(f"{layer}.mlp.gate_proj", inner_size, inner),
                Rows(f"{layer}.mlp.up_proj", inner_size, inner),
            ],
            hidden,
            bias=config.mlp_bias,
        )
        self._down: RowParallelLinear = parameters.row_parallel(
            f"{layer}.mlp.down_proj", (hidden, inner_size), inner, bias=config.mlp_bias
        )

    def __call__(self, hidden: Tensor, batch: ForwardBatch, rotation: Rotation, kv: LayerKv) -> Tensor:
        """Return the layer's output, [T, hidden]; ``hidden`` is left as it is."""
        hidden = self._o(self._attention(self._input_norm(hidden), batch, rotation, kv)).add_(hidden)
        return self._down(kernels.silu_mul(self._gate_up(self._post_norm(hidden)))).add_(hidden)

    def _attention(self, x: Tensor, batch: ForwardBatch, rotation: Rotation, kv: LayerKv) -> Tensor:
        parts = torch.split(self._qkv(x), self._qkv_sizes, dim=1)
        q, k, v = (part.view(x.shape[0], -1, self._head_dim) for part in parts)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q), self._k_norm(k)
        kernels.apply_rotary(q, k, rotation.cos, rotation.sin)
        return attend(q, k, v, batch, kv)


class LlamaDecoder:
    """Some consecutive layers."""

    def __init__(self, config: ModelConfig, blocks: list[LlamaBlock], device: torch.device) -> None:
        self._blocks = blocks
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self._frequencies = torch.tensor(frequencies, dtype=torch.float32, device=device)
        self._factor = attention_factor(config.rope_scaling)

    def __call__(self, hidden: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        """Return what comes out of the last layer, [T, hidden]."""
        angles = batch.positions.float().unsqueeze(1) * self._frequencies
        rotation = Rotation(angles.cos() * self._factor, angles.sin() * self._factor)
        for block, layer_kv in zip(self._blocks, kv.layers, strict=True):
            hidden = block(hidden, batch, rotation, layer_kv)
        return hidden


def _units(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
