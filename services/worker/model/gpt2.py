"""The GPT family: LayerNorm, learned positions (added at the embedding), full attention, plain MLP with GELU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import kernels
from services.worker.model.attention import attend
from services.worker.model.parameters import Parameters, Rows
from services.worker.model.partition import heads_of_rank, intermediate_of_rank

if TYPE_CHECKING:
    from torch import Tensor

    from services.worker.batch import ForwardBatch
    from services.worker.kv_cache import KvCache, LayerKv
    from services.worker.model.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["Gpt2Block", "Gpt2Decoder", "LayerNorm"]


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Normalisation to mean 0 and variance 1 over the last axis, then weight and bias."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return x normalised; x [..., n]."""
        return kernels.layer_norm(x, self.weight, self.bias, self.eps)

    @classmethod
    def load(cls, parameters: Parameters, name: str) -> LayerNorm:
        """Read the norm called ``name``, of the hidden size."""
        config = parameters.config
        weight, bias = (parameters.vector(f"{name}.{kind}", config.hidden_size) for kind in ("weight", "bias"))
        return cls(weight, bias, config.norm_eps)


class Gpt2Block:
    """One layer, of one rank."""

    def __init__(self, parameters: Parameters, index: int) -> None:
        config, tp = parameters.config, parameters.tp
        layer, hidden, inner_size = f"layers.{index}", config.hidden_size, config.intermediate_size
        heads = heads_of_rank(config, tp.rank, tp.size)
        units = range(heads.start * config.head_dim, heads.stop * config.head_dim)
        inner = intermediate_of_rank(config, tp.rank, tp.size)

        self._head_dim = config.head_dim
        self._ln_1 = LayerNorm.load(parameters, f"{layer}.input_layernorm")
        self._qkv: ColumnParallelLinear = parameters.column_parallel(
            [Rows(f"{layer}.self_attn.{name}", hidden, units) for name in ("q_proj", "k_proj", "v_proj")],
            hidden,
            bias=config.qkv_bias,
        )
        self._o: RowParallelLinear = parameters.row_parallel(
            f"{layer}.self_attn.o_proj", (hidden, hidden), units, bias=config.o_bias
        )
        self._ln_2 = LayerNorm.load(parameters, f"{layer}.post_attention_layernorm")
        self._up: ColumnParallelLinear = parameters.column_parallel(
            [Rows(f"{layer}.mlp.up_proj", inner_size, inner)], hidden, bias=config.mlp_bias
        )
        self._down: RowParallelLinear = parameters.row_parallel(
            f"{layer}.mlp.down_proj", (hidden, inner_size), inner, bias=config.mlp_bias
        )

    def __call__(self, hidden: Tensor, batch: ForwardBatch, kv: LayerKv) -> Tensor:
        """Return the layer's output, [T, hidden]; ``hidden`` is left as it is."""
        qkv = self._qkv(self._ln_1(hidden)).chunk(3, dim=1)
        q, k, v = (part.view(hidden.shape[0], -1, self._head_dim) for part in qkv)
        kernels.write_kv(k, v, kv.k, kv.v, batch.slot_mapping)
        hidden = self._o(attend(q, batch, kv)).add_(hidden)
        return self._down(kernels.gelu_tanh(self._up(self._ln_2(hidden)))).add_(hidden)


class Gpt2Decoder:
    """Some consecutive layers."""

    def __init__(self, blocks: list[Gpt2Block]) -> None:
        self._blocks = blocks

    def __call__(self, hidden: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        """Return what comes out of the last layer, [T, hidden]."""
        for block, layer_kv in zip(self._blocks, kv.layers, strict=True):
            hidden = block(hidden, batch, layer_kv)
        return hidden
