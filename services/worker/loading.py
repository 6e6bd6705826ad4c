"""One rank's part of a model, ready to run, with the numbers that the service needs of it.

The seam between the service and the models: here a name becomes a stage, be it of a Transformer or a synthetic one.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from kernels.native import library as native
from services.worker.comm import StageRanks
from services.worker.kv_cache import KvCache, bytes_per_block
from services.worker.model.quantized import quantization_fault
from services.worker.model.stage import load_stage
from services.worker.model.synthetic import HIDDEN_SIZE, KV_BYTES_PER_LAYER_TOKEN, SyntheticStage
from services.worker.sampling.guidance import Vocabulary
from shared.errors import ConfigError
from shared.log import get_logger
from shared.model import config as model_config
from shared.model.source import SyntheticModel
from shared.model.store import resolve
from shared.text.tokenizer import load_tokenizer
from shared.topology import split_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from kernels.native.head import GreedyHead
    from kernels.native.library import NativeKernels
    from services.worker.batch import ForwardBatch
    from shared.messages import JoinRequest
    from shared.model.config import ModelConfig
    from shared.model.source import ModelSource

__all__ = ["LoadedStage", "Place", "RunnableStage", "load", "place_of"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_QUANTIZED = "int8"


class RunnableStage(Protocol):
    """What the executor needs of a stage; shapes as in ``services.worker.model.stage``."""

    def forward(self, batch: ForwardBatch, hidden: Tensor | None, kv: KvCache) -> Tensor:
        """Return [num_tokens, hidden_size]; ``hidden`` is None on the first stage."""

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """Return [num_rows, vocab_size] float32; called by all ranks of the last stage together."""


@dataclass(frozen=True, slots=True)
class Place:
    """All that a rank's weights depend on: the same place in a later epoch keeps them."""

    model: str
    dtype: str
    """As it was asked for."""
    device: torch.device
    stage: int
    num_stages: int
    tp_rank: int
    tp_size: int
    block_size: int


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """A stage in memory. ``ranks`` is attached to a process group for each epoch."""

    place: Place
    stage: RunnableStage
    ranks: StageRanks
    hidden_size: int
    vocab_size: int
    max_model_len: int
    """The model's own limit, tokens."""
    dtype: torch.dtype
    """Of the activations."""
    dtype_name: str
    """How numbers are held, as people call it."""
    weights_bytes: int
    block_bytes: Callable[[int], int]
    """Bytes of K and V on this rank for one block of so many tokens."""
    vocabulary: Vocabulary
    """What grammars are made of."""
    allocate_kv: Callable[[int, int], KvCache]
    """K/V of (num_blocks, block_size); ``ConfigError`` where it does not fit."""
    greedy: GreedyHead | None = None
    """On the last stage: chooses the most likely tokens without logits, where the kernels can."""


def place_of(request: JoinRequest, device: torch.device) -> Place:
    """Return the place that a request to join asks for."""
    if request.dtype not in {"auto", _QUANTIZED, *_DTYPES}:
        raise ConfigError(f"--dtype must be one of auto, {_QUANTIZED}, {', '.join(_DTYPES)}, not {request.dtype!r}")
    return Place(
        model=request.model,
        dtype=request.dtype,
        device=device,
        stage=request.stage,
        num_stages=request.num_stages,
        tp_rank=request.tp_rank,
        tp_size=request.tp_size,
        block_size=request.block_size,
    )


def load(place: Place, progress: Callable[[int, int], None]) -> LoadedStage:
    """Load the weights of ``place``; ``progress`` gets (parts done, parts in all) and may raise to give up.

    Raises ``ModelNotFoundError``, ``ModelError`` or ``ConfigError``, each of which says what to do.
    """
    source = resolve(place.model)
    try:
        return _load_synthetic(place, source) if isinstance(source, SyntheticModel) else _load(place, source, progress)
    except (MemoryError, torch.OutOfMemoryError) as failure:
        raise ConfigError(
            f"the weights of stage {place.stage} do not fit the memory of {place.device}: "
            f"use more --stages or --tp, or a smaller model"
        ) from failure


def _load(place: Place, source: ModelSource, progress: Callable[[int, int], None]) -> LoadedStage:
    config = model_config.load(source)
    layers = split_layers(config.num_layers, place.num_stages)[place.stage]
    ranks = StageRanks(place.tp_rank, place.tp_size)
    numbers = _choose_numbers(place, config)
    stage = load_stage(
        source,
        layers=layers,
        is_first=place.stage == 0,
        is_last=place.stage == place.num_stages - 1,
        tp=ranks,
        device=place.device,
        dtype=numbers.activations,
        quantized=numbers.kernels,
        progress=progress,
    )
    _return_freed_memory()

    def block_bytes(block_size: int) -> int:
        return bytes_per_block(
            config,
            num_layers=len(layers),
            tp_size=place.tp_size,
            tp_rank=place.tp_rank,
            block_size=block_size,
            dtype=numbers.kv,
        )

    def allocate_kv(num_blocks: int, block_size: int) -> KvCache:
        return KvCache.allocate(
            config,
            num_layers=len(layers),
            tp_size=place.tp_size,
            tp_rank=place.tp_rank,
            num_blocks=num_blocks,
            block_size=block_size,
            device=place.device,
            dtype=numbers.kv,
        )

    return LoadedStage(
        place=place,
        stage=stage,
        ranks=ranks,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        dtype=numbers.activations,
        dtype_name=numbers.name,
        weights_bytes=_tensor_bytes(stage),
        block_bytes=block_bytes,
        vocabulary=Vocabulary(lambda: load_tokenizer(source), config.vocab_size),
        allocate_kv=allocate_kv,
        greedy=stage.greedy(),
    )


@dataclass(frozen=True, slots=True)
class Numbers:
    """How numbers are held."""

    name: str
    """As people call it: the value of ``--dtype``, with "auto" decided."""
    activations: torch.dtype
    kv: torch.dtype
    kernels: NativeKernels | None = None
    """Those that compute with quantised weights."""


def _choose_numbers(place: Place, config: ModelConfig) -> Numbers:
    """Decide "auto": on GPUs bfloat16; on CPUs quantised weights where the machine and the model allow it."""
    name, on_cpu = place.dtype, place.device.type == "cpu"
    kernels = missing = None
    if on_cpu:  # whatever the type: without them, every operation is torch's
        try:
            kernels = native.load()
            if kernels.failures:
                get_logger().warning("kernels_passed_over", used=kernels.name, reasons=kernels.failures)
        except native.KernelsUnavailableError as unavailable:
            missing = str(unavailable)
            get_logger().info("kernels_unavailable", reason=missing)
    if name == "auto" and not on_cpu:
        name = "bfloat16"
    if name in {"auto", _QUANTIZED}:
        fault = quantization_fault(config, tp_size=place.tp_size, block_size=place.block_size)
        if fault is None and kernels is not None:
            return Numbers(_QUANTIZED, torch.float32, torch.bfloat16, kernels)
        if name == _QUANTIZED:
            raise ConfigError(f"--dtype {_QUANTIZED} cannot be had: {fault or missing or 'it is for CPUs'}")
        if fault is not None:  # that there are no kernels has been told
            get_logger().info("not_quantized", reason=fault, dtype="float32")
        name = "float32"
    return Numbers(name, _DTYPES[name], _DTYPES[name])


def _load_synthetic(place: Place, source: SyntheticModel) -> LoadedStage:
    layers = split_layers(source.num_layers, place.num_stages)[place.stage]
    token_bytes = -(-KV_BYTES_PER_LAYER_TOKEN * len(layers) // place.tp_size)
    return LoadedStage(
        place=place,
        stage=SyntheticStage(source, place.device),
        ranks=StageRanks(place.tp_rank, place.tp_size),
        hidden_size=HIDDEN_SIZE,
        vocab_size=source.vocab_size,
        max_model_len=source.max_model_len,
        dtype=torch.float32,
        dtype_name="float32",
        weights_bytes=0,
        block_bytes=lambda block_size: block_size * token_bytes,
        vocabulary=Vocabulary(lambda: load_tokenizer(source), source.vocab_size),
        allocate_kv=lambda num_blocks, block_size: KvCache((), num_blocks, block_size),
    )


def _return_freed_memory() -> None:
    """Give back what loading took on its way: glibc keeps what is freed, which is more than quantised weights take."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _tensor_bytes(root: object) -> int:
    """Bytes of all tensors that an object of ours holds, shared storage counted once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    pending = [root]
    while pending:
        found = pending.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, torch.Tensor):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(found, (list, tuple)):
            pending += found
        elif type(found).__module__.startswith(("services.worker.model", "kernels.")):
            pending += _attributes(found)
    return sum(storages.values())


def _attributes(owner: object) -> Iterable[object]:
    slots = [name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ())]
    return [getattr(owner, name) for name in [*slots, *getattr(owner, "__dict__", {})]]
