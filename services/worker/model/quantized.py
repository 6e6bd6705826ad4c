"""A stage of the Llama family on a CPU with quantised weights: the compiled kernels in the place of torch.

Weights have 8 bits, and 4 as well where the file has them so, which serve iterations of few tokens; activations are
float32 between products and 8-bit inside them, K and V are bfloat16. Every sum is taken in the same order whatever the
batch is: what a token gets depends on the batch only in whether the iteration has few tokens or many, and not at all
where weights have 8 bits alone.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.native.head import GreedyHead
from kernels.native.library import (
    DIM_MULTIPLE,
    INTERMEDIATE_MULTIPLE,
    MAX_HEAD_DIM,
    UNIT,
    CKv,
    CLayer,
    CModel,
    CNorm,
    CShape,
    CStep,
    PackedMatrix,
    Workspace,
)
from kernels.native.threads import threads_for
from services.worker.model.linear import embed_over_ranks
from services.worker.model.partition import intermediate_of_rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kernels.native.library import NativeKernels
    from kernels.native.packing import Packer
    from services.worker.batch import ForwardBatch
    from services.worker.kv_cache import KvCache
    from services.worker.model.linear import LogitsMemory, VocabParallelEmbedding
    from services.worker.model.llama import LlamaWeights, RmsNorm
    from services.worker.tensor_parallel import TensorParallel
    from shared.model.config import ModelConfig

__all__ = ["QuantizedHead", "QuantizedLayer", "QuantizedLlama", "QuantizedVocab", "quantization_fault"]


def quantization_fault(config: ModelConfig, *, tp_size: int, block_size: int) -> str | None:
    """Return why a model cannot be run so, None where it can."""
    if config.family != "llama":
        return f"models of the {config.family} family are not supported"
    if config.o_bias or config.mlp_bias:
        return "biases of output and MLP projections are not supported"
    if config.head_dim % DIM_MULTIPLE or config.head_dim > MAX_HEAD_DIM:
        return f"heads of {config.head_dim} numbers are not supported"
    if block_size % UNIT:
        return f"--block-size is not a multiple of {UNIT}"
    for rank in range(tp_size):
        if len(intermediate_of_rank(config, rank, tp_size)) % INTERMEDIATE_MULTIPLE:
            return f"the intermediate size of a rank is not a multiple of {INTERMEDIATE_MULTIPLE}"
    return None


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """One layer's weights, of one rank."""

    weights: LlamaWeights
    """The shape, norms and biases; not the matrices."""
    qkv: PackedMatrix
    o: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix

    @classmethod
    def pack(cls, packer: Packer, weights: LlamaWeights) -> QuantizedLayer:
        """Quantise a layer that was read as float32."""
        return cls(
            weights.without_matrices(),
            qkv=packer.pack(weights.qkv.weight),
            o=packer.pack(weights.o.weight),
            gate_up=packer.pack(weights.gate_up.weight),
            down=packer.pack(weights.down.weight),
        )

    def as_c(self) -> CLayer:
        """As the kernels take it, without K/V; valid while this object lives."""
        weights, bias = self.weights, self.weights.qkv.bias
        return CLayer(
            _norm(weights.input_norm),
            self.qkv.as_c(),
            None if bias is None else bias.data_ptr(),
            _norm(weights.q_norm),
            _norm(weights.k_norm),
            self.o.as_c(),
            _norm(weights.post_norm),
            self.gate_up.as_c(),
            self.down.as_c(),
        )


class QuantizedLlama:
    """Some consecutive layers of one rank."""

    def __init__(
        self,
        kernels: NativeKernels,
        config: ModelConfig,
        layers: Sequence[QuantizedLayer],
        rotation: tuple[Tensor, Tensor],
        tp: TensorParallel,
    ) -> None:
        """``rotation``: cosines and sines of every position, [max_model_len, head_dim / 2] float32 each."""
        weights = layers[0].weights
        cos, sin = rotation
        self._kernels = kernels
        self._tp = tp
        self._owned = (tuple(layers), rotation)  # what the addresses below point into
        self._model = CModel(
            CShape(weights.num_heads, weights.num_kv_heads, weights.head_dim),
            config.hidden_size,
            layers[0].down.k,
            cos.data_ptr(),
            sin.data_ptr(),
        )
        self._layers = (CLayer * len(layers))(*(layer.as_c() for layer in layers))
        self._kv: KvCache | None = None
        self._workspace = Workspace()

    def __call__(self, hidden: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor:
        """Return what comes out of the last layer, [T, hidden] float32; ``hidden`` is left as it is."""
        if kv is not self._kv:
            self._attach(kv)
        kernels, threads = self._kernels, threads_for(batch.num_tokens)
        hidden = hidden.clone()
        model, step = byref(self._model), byref(_step(batch, kv.block_size))
        workspace = self._workspace.address(kernels.layers_bytes(model, batch.num_tokens))
        if self._tp.size == 1:
            kernels.layers(model, self._layers, len(self._layers), step, hidden.data_ptr(), workspace, threads, None)
            return hidden
        part = torch.empty_like(hidden)
        for layer in self._layers:
            at = byref(layer)
            kernels.layer_attention(model, at, step, hidden.data_ptr(), part.data_ptr(), workspace, threads)
            hidden += self._tp.all_reduce(part)
            kernels.layer_mlp(model, at, batch.num_tokens, hidden.data_ptr(), part.data_ptr(), workspace, threads)
            hidden += self._tp.all_reduce(part)
        return hidden

    def _attach(self, kv: KvCache) -> None:
        for layer, layer_kv in zip(self._layers, kv.layers, strict=True):
            layer.kv = CKv(layer_kv.k.data_ptr(), layer_kv.v.data_ptr())
        self._kv = kv


@dataclass(frozen=True, slots=True)
class QuantizedVocab:
    """The embedding table, of which each rank holds some tokens' rows."""

    kernels: NativeKernels
    table: PackedMatrix
    """[vocab_of_rank + padding, hidden]"""
    vocab: range
    """Token ids of this rank's rows."""
    tp: TensorParallel

    @classmethod
    def pack(cls, packer: Packer, whole: VocabParallelEmbedding) -> QuantizedVocab:
        """Quantise a table that was read as float32."""
        return cls(packer.kernels, packer.pack(whole.table), whole.vocab, whole.tp)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return [T, hidden] float32; token_ids [T] int64."""
        return embed_over_ranks(token_ids, self.vocab, self.tp, lambda rows: self.kernels.gather_rows(self.table, rows))


@dataclass(frozen=True, slots=True)
class QuantizedHead:
    """From hidden rows to logits, the last norm included."""

    norm: RmsNorm
    vocab: QuantizedVocab
    vocab_size: int
    memory: LogitsMemory
    """Of rows of ``vocab``."""

    def __call__(self, hidden_rows: Tensor) -> Tensor:
        """Return [S, vocab_size] float32, which hold until the next call; hidden_rows [S, hidden]."""
        vocab, norm = self.vocab, self.norm
        part = self.memory.rows(len(hidden_rows))
        vocab.kernels.linear(hidden_rows.contiguous(), vocab.table, norm.weight, norm.eps, part)
        return vocab.tp.gather_last_dim(part)[:, : self.vocab_size]

    def greedy(self) -> GreedyHead | None:
        """Return the same without logits; None where ranks share the vocabulary."""
        vocab = self.vocab
        if vocab.tp.size > 1 or vocab.table.n != self.vocab_size:
            return None
        return GreedyHead(vocab.kernels, vocab.table, self.norm.weight, self.norm.eps)


def _norm(norm: RmsNorm | None) -> CNorm:
    return CNorm(None, 0.0) if norm is None else CNorm(norm.weight.data_ptr(), norm.eps)


def _step(batch: ForwardBatch, block_size: int) -> CStep:
    return CStep(
        batch.num_tokens,
        batch.num_requests,
        batch.positions.data_ptr(),
        batch.slot_mapping.data_ptr(),
        batch.query_start.data_ptr(),
        batch.context_lens.data_ptr(),
        batch.block_tables.data_ptr(),
        batch.block_tables.shape[1],
        block_size,
    )
