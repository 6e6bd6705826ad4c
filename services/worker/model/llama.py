"""The Llama family: RMSNorm, rotary positions, grouped-query attention, gated MLP.

Llama, SmolLM2 and Mistral as they are; Qwen2 adds biases to q, k and v; Qwen3 normalises each head of q and k.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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

__all__ = ["LlamaBlock", "LlamaDecoder", "LlamaWeights", "RmsNorm", "rotation_at"]


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Root-mean-square normalisation over the last axis."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return x normalised; x [..., n]."""
        return kernels.rms_norm(x, self.weight, self.eps)

    def of_sum(self, update: Tensor, hidden: Tensor) -> Tensor:
        """Add ``hidden`` to ``update`` in place, and return that normalised; both [..., n]."""
        return kernels.add_rms_norm(update, hidden, self.weight, self.eps)

    @classmethod
    def load(cls, parameters: Parameters, name: str, size: int | None = None) -> RmsNorm:
        """Read the norm called ``name``; of ``size`` elements, or the hidden size."""
        config = parameters.config
        return cls(parameters.vector(f"{name}.weight", size or config.hidden_size), config.norm_eps)


class Rotation(NamedTuple):
    """How far the heads of each token are turned: cosines and sines, [T, D / 2] float32 each."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """One layer's weights, of one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    input_norm: RmsNorm
    qkv: ColumnParallelLinear
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    o: RowParallelLinear
    post_norm: RmsNorm
    gate_up: ColumnParallelLinear
    down: RowParallelLinear

    @classmethod
    def load(cls, parameters: Parameters, index: int) -> LlamaWeights:
        """Read the layer's part that this rank has."""
        config, tp = parameters.config, parameters.tp
        layer, hidden, dim = f"layers.{index}", config.hidden_size, config.head_dim
        num_heads = heads_of_rank(config, tp.rank, tp.size)
        num_kv_heads = kv_heads_of_rank(config, tp.rank, tp.size)
        heads, kv_heads = _units(num_heads, dim), _units(num_kv_heads, dim)
        inner = intermediate_of_rank(config, tp.rank, tp.size)
        inner_size, q_size, kv_size = config.intermediate_size, config.num_heads * dim, config.num_kv_heads * dim
        return cls(
            num_heads=len(num_heads),
            num_kv_heads=len(num_kv_heads),
            head_dim=dim,
            input_norm=RmsNorm.load(parameters, f"{layer}.input_layernorm"),
            qkv=parameters.column_parallel(
                [
                    Rows(f"{layer}.self_attn.q_proj", q_size, heads),
                    Rows(f"{layer}.self_attn.k_proj", kv_size, kv_heads),
                    Rows(f"{layer}.self_attn.v_proj", kv_size, kv_heads),
                ],
                hidden,
                bias=config.qkv_bias,
            ),
            q_norm=RmsNorm.load(parameters, f"{layer}.self_attn.q_norm", dim) if config.qk_norm else None,
            k_norm=RmsNorm.load(parameters, f"{layer}.self_attn.k_norm", dim) if config.qk_norm else None,
            o=parameters.row_parallel(f"{layer}.self_attn.o_proj", (hidden, q_size), heads, bias=config.o_bias),
            post_norm=RmsNorm.load(parameters, f"{layer}.post_attention_layernorm"),
            gate_up=parameters.column_parallel(
                [
                    Rows(f"{layer}.mlp.gate_proj", inner_size, inner),
                    Rows(f"{layer}.mlp.up_proj", inner_size, inner),
                ],
                hidden,
                bias=config.mlp_bias,
            ),
            down=parameters.row_parallel(f"{layer}.mlp.down_proj", (hidden, inner_size), inner, bias=config.mlp_bias),
        )

    def without_matrices(self) -> LlamaWeights:
        """Return the same with empty matrices: norms and biases stay."""
        return replace(
            self,
            qkv=replace(self.qkv, weight=self.qkv.weight.new_empty(0)),
            o=replace(self.o, weight=self.o.weight.new_empty(0)),
            gate_up=replace(self.gate_up, weight=self.gate_up.weight.new_empty(0)),
            down=replace(self.down, weight=self.down.weight.new_empty(0)),
        )


class LlamaBlock:
    """One layer, of one rank."""

    def __init__(self, weights: LlamaWeights) -> None:
        self._weights = weights
        dim = weights.head_dim
        self._qkv_sizes = [weights.num_heads * dim, weights.num_kv_heads * dim, weights.num_kv_heads * dim]

    def __call__(self, hidden: Tensor, batch: ForwardBatch, rotation: Rotation, kv: LayerKv) -> Tensor:
        """Return the layer's output, [T, hidden]; ``hidden`` is left as it is."""
        weights = self._weights
        between = weights.o(self._attention(weights.input_norm(hidden), batch, rotation, kv))
        normed = weights.post_norm.of_sum(between, hidden)
        return weights.down(kernels.silu_mul(weights.gate_up(normed))).add_(between)

    def _attention(self, x: Tensor, batch: ForwardBatch, rotation: Rotation, kv: LayerKv) -> Tensor:
        weights = self._weights
        parts = torch.split(weights.qkv(x), self._qkv_sizes, dim=1)
        q, k, v = (part.view(x.shape[0], -1, weights.head_dim) for part in parts)
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = weights.q_norm(q), weights.k_norm(k)
        kernels.rotate_and_write_kv(q, k, v, rotation.cos, rotation.sin, kv.k, kv.v, batch.slot_mapping)
        return attend(q, batch, kv)


class LlamaDecoder:
    """Some consecutive layers."""

    def __init__(self, config: ModelConfig, blocks: list[LlamaBlock], device: torch.device) -> None:
        self._blocks = blocks
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self._frequencies = torch.tensor(frequencies, dtype=torch.float32, device=device)
        self._factor = attention_factor(config.rope_scaling)

    def __call__(self, hidden: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        """Return what comes out of the last layer, [T, hidden]."""
        rotation = rotation_of(batch.positions, self._frequencies, self._factor)
        for block, layer_kv in zip(self._blocks, kv.layers, strict=True):
            hidden = block(hidden, batch, rotation, layer_kv)
        return hidden


def rotation_at(config: ModelConfig, positions: Tensor) -> Rotation:
    """Return how far the heads of tokens at ``positions`` [T] are turned."""
    frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    on_device = torch.tensor(frequencies, dtype=torch.float32, device=positions.device)
    return rotation_of(positions, on_device, attention_factor(config.rope_scaling))


def rotation_of(positions: Tensor, frequencies: Tensor, factor: float) -> Rotation:
    """Return cosines and sines of [T] positions at [D / 2] frequencies."""
    angles = positions.float().unsqueeze(1) * frequencies
    return Rotation(angles.cos() * factor, angles.sin() * factor)


def _units(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
