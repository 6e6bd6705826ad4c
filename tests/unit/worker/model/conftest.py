"""A whole model in one process: every stage and tensor-parallel rank, run step by step over a paged cache."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch import Tensor

from kernels.native.library import UNIT
from services.worker.batch import ForwardBatch
from services.worker.kv_cache import KvCache
from services.worker.model import StageModel, load_stage
from services.worker.tensor_parallel import SingleRank, TensorParallel
from shared.model.config import load

if TYPE_CHECKING:
    from pathlib import Path

    from kernels.native.library import NativeKernels
    from shared.model.source import ModelSource

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 64


class _Meeting:
    """Where the ranks of one stage, each in its own thread, exchange tensors."""

    def __init__(self, size: int) -> None:
        self.tensors: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=30)


@dataclass
class ThreadRank:
    """A rank among threads; deterministic, since all sum in the order of ranks."""

    rank: int
    size: int
    meeting: _Meeting

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self.meeting.tensors[self.rank] = tensor.clone()
        self.meeting.barrier.wait()
        parts = list(self.meeting.tensors)
        self.meeting.barrier.wait()
        return parts

    def all_reduce(self, tensor: Tensor) -> Tensor:
        total = torch.zeros_like(tensor)
        for part in self._exchange(tensor):
            total += part
        return tensor.copy_(total)

    def gather_last_dim(self, tensor: Tensor) -> Tensor:
        return torch.cat(self._exchange(tensor), dim=-1)


@dataclass
class Sequence:
    """One request's place in the cache."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0


class Mesh:
    """Stages x ranks of one model."""

    def __init__(
        self,
        source: ModelSource,
        num_stages: int,
        tp_size: int,
        dtype: torch.dtype = torch.float32,
        quantized: NativeKernels | None = None,
        block_size: int | None = None,
    ) -> None:
        """``block_size``: of ``UNIT`` tokens if the compiled kernels are to have part in it."""
        self.config = load(source)
        self._block_size = block_size or (BLOCK_SIZE if quantized is None else UNIT)
        cuts = [self.config.num_layers * stage // num_stages for stage in range(num_stages + 1)]
        self._stages: list[list[tuple[StageModel, KvCache]]] = []
        self._free = list(range(NUM_BLOCKS))
        self._free = self._free[1::2] + self._free[::2]  # so that no request's blocks lie side by side
        self._sequences: dict[str, Sequence] = {}
        for stage in range(num_stages):
            layers = range(cuts[stage], cuts[stage + 1])
            meeting = _Meeting(tp_size)
            ranks = []
            for rank in range(tp_size):
                tp: TensorParallel = SingleRank() if tp_size == 1 else ThreadRank(rank, tp_size, meeting)
                model = load_stage(
                    source,
                    layers=layers,
                    is_first=stage == 0,
                    is_last=stage == num_stages - 1,
                    tp=tp,
                    device=CPU,
                    dtype=dtype,
                    quantized=quantized,
                )
                kv = KvCache.allocate(
                    self.config,
                    num_layers=len(layers),
                    tp_size=tp_size,
                    tp_rank=rank,
                    num_blocks=NUM_BLOCKS,
                    block_size=self._block_size,
                    device=CPU,
                    dtype=dtype if quantized is None else torch.bfloat16,
                )
                for layer in kv.layers:  # what was not written must not be seen
                    layer.k.fill_(torch.nan)
                    layer.v.fill_(torch.nan)
                ranks.append((model, kv))
            self._stages.append(ranks)

    def step(self, tokens: dict[str, list[int]]) -> dict[str, Tensor]:
        """Run one iteration over some tokens of each request; return the logits after each of these."""
        batch = self._batch(tokens)
        hidden: Tensor | None = None
        logits: Tensor = torch.empty(0)
        with ThreadPoolExecutor(len(self._stages[0])) as pool:
            for number, ranks in enumerate(self._stages):
                futures = [pool.submit(model.forward, batch, hidden, kv) for model, kv in ranks]
                outs = [future.result() for future in futures]
                assert all(torch.equal(out, outs[0]) for out in outs)
                hidden = outs[0]
                if number == len(self._stages) - 1:
                    heads = [pool.submit(model.logits, hidden[batch.sample_rows]) for model, _ in ranks]
                    all_logits = [future.result() for future in heads]
                    assert all(torch.equal(each, all_logits[0]) for each in all_logits)
                    logits = all_logits[0].clone()  # they hold until the next call
        ends = batch.query_start.tolist()
        return {name: logits[ends[i] : ends[i + 1]] for i, name in enumerate(tokens)}

    def _batch(self, tokens: dict[str, list[int]]) -> ForwardBatch:
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        sequences = [self._sequences.setdefault(name, Sequence()) for name in tokens]
        for sequence, ids in zip(sequences, tokens.values(), strict=True):
            span = range(sequence.length, sequence.length + len(ids))
            while len(sequence.blocks) * self._block_size < span.stop:
                sequence.blocks.append(self._free.pop())
            positions += span
            slots += [sequence.blocks[p // self._block_size] * self._block_size + p % self._block_size for p in span]
            starts.append(starts[-1] + len(ids))
            sequence.length = span.stop
        longest = max(len(sequence.blocks) for sequence in sequences)
        return ForwardBatch.from_arrays(
            token_ids=[token for ids in tokens.values() for token in ids],
            positions=positions,
            slot_mapping=slots,
            query_start=starts,
            context_lens=[sequence.length for sequence in sequences],
            block_tables=[sequence.blocks + [0] * (longest - len(sequence.blocks)) for sequence in sequences],
            sample_rows=range(starts[-1]),
            device=CPU,
        )

    def run_mixed(self, sequences: dict[str, list[int]]) -> dict[str, Tensor]:
        """Compute all logits of sequences a, b and c (7 tokens at least) in iterations of every kind mixed."""
        a, b, c = (sequences[name] for name in "abc")
        steps: list[dict[str, list[int]]] = [
            {"a": a[:-6], "b": b[:3]},  # a whole prefill and a first chunk
            {"b": b[3:-3], "a": a[-6:-5], "c": c[:-5]},  # a chunk with context, a decode, a whole prefill
            {"a": a[-5:-4], "b": b[-3:-2], "c": c[-5:-4]},  # decodes of different lengths
            {"c": c[-4:-2], "b": b[-2:-1], "a": a[-4:-1]},
            {"b": b[-1:], "c": c[-2:-1]},
            {"c": c[-1:], "a": a[-1:]},
        ]
        parts: dict[str, list[Tensor]] = {"a": [], "b": [], "c": []}
        for tokens in steps:
            for name, logits in self.step(tokens).items():
                parts[name].append(logits)
        return {name: torch.cat(logits) for name, logits in parts.items()}


MakeMesh = Callable[..., Mesh]


@pytest.fixture(scope="session")
def make_mesh() -> MakeMesh:
    """Build a mesh of stages and ranks: make_mesh(source, num_stages, tp_size)."""
    return Mesh


@pytest.fixture
def sequences() -> dict[str, list[int]]:
    """Token ids below 90 of three requests."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randint(0, 90, (length,), generator=generator).tolist()
        for name, length in (("a", 13), ("b", 31), ("c", 7))
    }


@pytest.fixture(scope="session")
def make_hf_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], tuple[Path, Any]]:
    """Build a model from a transformers configuration, with lively weights, norms and biases, and save it."""
    library: Any = transformers
    library.utils.logging.disable_progress_bar()  # tqdm would leave a thread behind

    def make(config: Any) -> tuple[Path, Any]:
        torch.manual_seed(3)
        model = library.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm.weight" in name or ".ln_" in name else 0.0, 0.2)
        folder = tmp_path_factory.mktemp("hf")
        model.save_pretrained(folder)
        return folder, model

    return make
