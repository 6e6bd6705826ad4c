"""One pipeline stage of one tensor-parallel rank: embedding if it is the first, some layers, head if it is the last.

Knows how a stage is put together and run; not who sends it hidden states, nor when.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone uses

from kernels.native.packing import Packer
from services.worker.model.gpt2 import Gpt2Block, Gpt2Decoder, LayerNorm
from services.worker.model.linear import LogitsMemory, OutputHead, VocabParallelEmbedding
from services.worker.model.llama import LlamaBlock, LlamaDecoder, LlamaWeights, RmsNorm, rotation_at
from services.worker.model.parameters import Parameters
from services.worker.model.partition import check_divisible, padded_vocab_part, vocab_of_rank
from services.worker.model.quantized import QuantizedHead, QuantizedLayer, QuantizedLlama, QuantizedVocab
from services.worker.model.sources import open_weights
from shared.errors import ConfigError, ModelError
from shared.model.config import load

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kernels.native.head import GreedyHead
    from kernels.native.library import NativeKernels
    from services.worker.batch import ForwardBatch
    from services.worker.kv_cache import KvCache
    from services.worker.tensor_parallel import TensorParallel
    from shared.model.config import ModelConfig
    from shared.model.source import ModelSource

__all__ = ["StageModel", "load_stage"]

_T = TypeVar("_T")


class StageModel(Protocol):
    """What the executor runs."""

    @property
    def config(self) -> ModelConfig:
        """Architecture of the whole model."""

    def forward(self, batch: ForwardBatch, hidden: Tensor | None, kv: KvCache) -> Tensor:
        """Return the stage's output, [num_tokens, hidden_size], and write this iteration's K and V.

        ``hidden`` is the stage before's output, which is left as it is; None on the first stage. All ranks of the stage
        call it together.
        """

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """Return [num_rows, vocab_size] float32 on every rank of the last stage, which all call it together.

        They are the caller's to change, and hold until the next call.

        ``hidden_rows`` are rows of ``forward``'s output: ``out[batch.sample_rows]``.
        """

    def greedy(self) -> GreedyHead | None:
        """Return how to choose the most likely tokens without logits; None where there is no such way."""


class _Decoder(Protocol):
    def __call__(self, hidden: Tensor, batch: ForwardBatch, kv: KvCache) -> Tensor: ...


class _Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Embedding:
    tokens: VocabParallelEmbedding | QuantizedVocab
    positions: Tensor | None
    """[max_model_len, hidden], of the GPT family."""

    def __call__(self, batch: ForwardBatch) -> Tensor:
        hidden = self.tokens(batch.token_ids)
        return hidden if self.positions is None else hidden.add_(F.embedding(batch.positions, self.positions))


@dataclass(frozen=True, slots=True)
class _Head:
    norm: _Norm
    output: OutputHead

    def __call__(self, hidden_rows: Tensor) -> Tensor:
        return self.output(self.norm(hidden_rows))


@dataclass(frozen=True, slots=True)
class _Stage:
    config: ModelConfig
    embedding: _Embedding | None
    decoder: _Decoder
    head: _Head | QuantizedHead | None

    def forward(self, batch: ForwardBatch, hidden: Tensor | None, kv: KvCache) -> Tensor:
        with torch.inference_mode():
            if self.embedding is not None:
                hidden = self.embedding(batch)
            if hidden is None:
                raise ValueError("only the first stage makes its own hidden states")
            return self.decoder(hidden, batch, kv)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        if self.head is None:
            raise ValueError("only the last stage has an output head")
        with torch.inference_mode():
            return self.head(hidden_rows)

    def greedy(self) -> GreedyHead | None:
        return self.head.greedy() if isinstance(self.head, QuantizedHead) else None


def load_stage(
    source: ModelSource,
    *,
    layers: range,
    is_first: bool,
    is_last: bool,
    tp: TensorParallel,
    device: torch.device,
    dtype: torch.dtype,
    quantized: NativeKernels | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> StageModel:
    """Load this rank's part of ``layers``, with the embedding if first and norm and head if last.

    ``quantized``: with quantised weights, on these kernels; ``dtype`` is float32 then, and K/V bfloat16.

    ``progress`` is called with (parts done, parts in all) as each layer, the embedding and the head are there.
    Raises ModelError when the weights cannot be read or used, ConfigError when the ranks cannot share the model.
    """
    config = load(source)
    check_divisible(config, tp.size)
    if layers.step != 1 or not 0 <= layers.start <= layers.stop <= config.num_layers:
        raise ConfigError(f"Layers {layers.start} to {layers.stop} are not within the model's {config.num_layers}.")
    parameters = Parameters(config, open_weights(source, config, device), tp, device, dtype)
    steps = _Steps(len(layers) + is_first + is_last, progress)

    if quantized is not None:
        return _load_quantized(quantized, parameters, layers, steps, is_first=is_first, is_last=is_last)
    tokens = steps.did(_load_vocab(parameters, "embed_tokens.weight")) if is_first else None
    decoder: _Decoder
    if config.family == "llama":
        blocks = [steps.did(LlamaBlock(LlamaWeights.load(parameters, index))) for index in layers]
        decoder = LlamaDecoder(config, blocks, device)
    else:
        decoder = Gpt2Decoder([steps.did(Gpt2Block(parameters, index)) for index in layers])
    head = steps.did(_load_head(parameters, tokens)) if is_last else None
    embedding = None if tokens is None else _Embedding(tokens, _load_positions(parameters))
    return _Stage(config, embedding, decoder, head)


def _load_quantized(
    kernels: NativeKernels, parameters: Parameters, layers: range, steps: _Steps, *, is_first: bool, is_last: bool
) -> StageModel:
    """The same with quantised weights: each matrix is read as float32, quantised and dropped."""
    config, tp, packer = parameters.config, parameters.tp, Packer(kernels)
    tokens = None
    if is_first:
        tokens = steps.did(QuantizedVocab.pack(packer, _load_vocab(parameters, "embed_tokens.weight")))
    packed = [steps.did(QuantizedLayer.pack(packer, LlamaWeights.load(parameters, index))) for index in layers]
    rotation = rotation_at(config, torch.arange(config.max_model_len))
    decoder = QuantizedLlama(kernels, config, packed, rotation, tp)
    head = None
    if is_last:
        norm = RmsNorm.load(parameters, "norm")
        if not config.tie_embeddings:
            vocab = QuantizedVocab.pack(packer, _load_vocab(parameters, "lm_head.weight"))
        else:
            whole = _load_vocab(parameters, "embed_tokens.weight")
            _check_redundant_head(parameters, whole)
            vocab = tokens or QuantizedVocab.pack(packer, whole)
        head = steps.did(QuantizedHead(norm, vocab, config.vocab_size, LogitsMemory(vocab.table.n)))
    return _Stage(config, None if tokens is None else _Embedding(tokens, None), decoder, head)


def _load_positions(parameters: Parameters) -> Tensor | None:
    config = parameters.config
    if config.family != "gpt2":
        return None
    size = config.max_model_len
    return parameters.matrix("embed_positions.weight", (size, config.hidden_size), range(size))


def _load_head(parameters: Parameters, tokens: VocabParallelEmbedding | None) -> _Head:
    config = parameters.config
    norm: _Norm = (RmsNorm if config.family == "llama" else LayerNorm).load(parameters, "norm")
    if not config.tie_embeddings:
        vocab = _load_vocab(parameters, "lm_head.weight")
    else:
        vocab = tokens or _load_vocab(parameters, "embed_tokens.weight")
        _check_redundant_head(parameters, vocab)
    return _Head(norm, OutputHead(vocab.table, config.vocab_size, parameters.tp))


def _load_vocab(parameters: Parameters, name: str) -> VocabParallelEmbedding:
    config, tp = parameters.config, parameters.tp
    vocab = vocab_of_rank(config, tp.rank, tp.size)
    table = parameters.matrix(
        name, (config.vocab_size, config.hidden_size), vocab, padded_rows=padded_vocab_part(config, tp.size)
    )
    return VocabParallelEmbedding(table, vocab, tp)


def _check_redundant_head(parameters: Parameters, tied: VocabParallelEmbedding) -> None:
    """Refuse a model that says its head is the embedding table and then brings another one."""
    name = "lm_head.weight"
    if parameters.source.has(name) and not torch.equal(_load_vocab(parameters, name).table, tied.table):
        raise ModelError(
            f"The model's configuration ties the output head to the embedding, but its {name} is a different one: "
            'set "tie_word_embeddings" to false in config.json if the head is meant, or delete the tensor.'
        )


class _Steps:
    """Counts what is loaded."""

    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self._done = 0
        self._total = total
        self._progress = progress

    def did(self, part: _T) -> _T:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)
        return part
