"""The parts of one iteration, each by itself in this process: the model's on warm threads, Python's on this one.

The model is the real one, decoding for N sequences with ``context`` tokens each; the kernels themselves tell where the
time of the layers went. Python's functions are those of scheduler, worker and gateway over a steady iteration: control
message, preparation, result, tokens.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import random
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from kernels.native import library
from kernels.native.threads import threads_for
from services.scheduler.core.capacity import Capacity
from services.scheduler.core.core import SchedulerCore
from services.worker.batch import ForwardBatch
from services.worker.loading import Place, load
from services.worker.outcome import Outcome
from services.worker.preparation import StepPreparer
from services.worker.sampling.guidance import Vocabulary
from services.worker.sampling.sampler import ChosenTokens
from shared.codec.session import session_events_from_pb, session_events_to_pb
from shared.codec.step_columns import step_columns_from_pb
from shared.codec.steps import step_plan_to_pb, step_result_from_pb, step_result_to_pb
from shared.config import SchedulingConfig
from shared.ids import Epoch, Handle, RequestId
from shared.messages import Joined, JoinRequest, SamplingParams, SessionEvents, Submit, token_ids
from shared.model import config as model_config
from shared.model.store import resolve
from shared.pb import scheduler_pb2, worker_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.scheduler.core.events import TokenEvent
    from services.worker.loading import LoadedStage
    from shared.codec.step_columns import StepColumns
    from shared.messages import StepResult
    from shared.model.config import ModelConfig
    from shared.text.tokenizer import Tokenizer

__all__ = ["ModelParts", "ModelProfiler", "python_parts"]

_T = TypeVar("_T")

_BLOCK = 16
_WARM_UP = 3
_TIMINGS = ("products", "attention", "other")
_GROUPS_BYTES = 0.625
"""Of a 4-bit weight, with its part of a scale and an offset of 2 bytes each for 32."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Medians of one iteration, microseconds; bytes and multiply-adds are what the work comes to at least."""

    threads: int
    """That computed: the kernels choose, at most as many as were asked for."""
    products_us: float
    """Of the layers; as the first of the threads sees it, like the next two."""
    attention_us: float
    other_us: float
    """Norms, rotary embedding, K/V written, activation, quantisation; the embedding, and Python around it."""
    head_us: float
    """With the choice of the most likely tokens."""
    products_bytes: int
    products_multiplies: int
    attention_bytes: int
    head_bytes: int
    head_multiplies: int

    @property
    def whole_us(self) -> float:
        """All parts."""
        return self.products_us + self.attention_us + self.other_us + self.head_us


class ModelProfiler:
    """One model in memory, on the compiled kernels."""

    def __init__(self, model: str) -> None:
        self._loaded: LoadedStage = load(Place(model, "int8", _CPU, 0, 1, 0, 1, _BLOCK), _no_progress)
        self._config: ModelConfig = model_config.load(resolve(model))
        self._timings = library.CTimings()
        kernels = library.load()  # the one that the stage has, too
        layers = kernels.layers

        def timed_layers(*arguments: object) -> None:
            layers(*arguments[:-1], ctypes.byref(self._timings))

        kernels.layers = timed_layers  # type: ignore[assignment]  # called as the library's function is

    def profile(self, num_sequences: int, context: int, threads: int, repeats: int) -> ModelParts:
        """Measure one iteration of so many sequences, on at most so many threads."""
        torch.set_num_threads(threads)
        stage, config = self._loaded.stage, self._config
        batch = _decode_batch(num_sequences, context)
        kv = self._loaded.allocate_kv(int(batch.block_tables.max()) + 1, _BLOCK)
        for layer in kv.layers:
            layer.k.zero_()
            layer.v.zero_()
        greedy = self._loaded.greedy
        assert greedy is not None
        laps: dict[str, list[float]] = {name: [] for name in ("layers", "head", *_TIMINGS)}
        with torch.inference_mode():
            for _ in range(repeats + _WARM_UP):
                ctypes.memset(ctypes.byref(self._timings), 0, ctypes.sizeof(self._timings))
                times = [time.perf_counter()]
                hidden = stage.forward(batch, None, kv)
                times.append(time.perf_counter())
                greedy(hidden, batch.sample_rows)
                times.append(time.perf_counter())
                for name, (earlier, later) in zip(laps, itertools.pairwise(times), strict=False):
                    laps[name].append(1e6 * (later - earlier))
                for name in _TIMINGS:
                    laps[name].append(1e-3 * getattr(self._timings, name))
        us = {name: statistics.median(times[_WARM_UP:]) for name, times in laps.items()}
        size = config.num_layers * sum(n * k for n, k in _matrix_shapes(config))
        head_size = config.vocab_size * config.hidden_size
        return ModelParts(
            threads=threads_for(num_sequences),
            products_us=us["products"],
            attention_us=us["attention"],
            other_us=us["layers"] - us["products"] - us["attention"],
            head_us=us["head"],
            products_bytes=int(size * (_GROUPS_BYTES if num_sequences <= library.load().few_rows else 1)),
            products_multiplies=num_sequences * size,
            attention_bytes=num_sequences * context * self._loaded.block_bytes(_BLOCK) // _BLOCK,
            head_bytes=head_size,
            head_multiplies=num_sequences * head_size,
        )


def python_parts(num_sequences: int, prompt_tokens: int, num_iterations: int) -> dict[str, float]:
    """Return what Python's functions take of a steady iteration, microseconds, medians by name.

    Their code and data are warm here. In a mesh the model's weights have passed through the caches since the last
    iteration, and all of it takes several times as long.
    """
    model_len, vocab_size = prompt_tokens + num_iterations + 2, 49152
    num_blocks = num_sequences * (model_len // _BLOCK + 1)
    core = SchedulerCore(SchedulingConfig(max_batch_size=num_sequences, max_batch_tokens=1 << 20))
    core.engine_ready(Epoch(1), Capacity(num_blocks, _BLOCK, 1, model_len, vocab_size))
    preparer = StepPreparer(
        JoinRequest(Epoch(1), 0, 0, 1, 1, "", "", "auto", _BLOCK, 1, 0, "", (), 60, workers_append_tokens=True),
        Joined(num_blocks, model_len, vocab_size, "int8", 0, 0),
        Vocabulary(_no_tokenizer, vocab_size),
        _CPU,
    )
    rng = random.Random(0)
    for index in range(num_sequences):
        prompt = token_ids(rng.randrange(vocab_size) for _ in range(prompt_tokens))
        sampling = SamplingParams(temperature=0.0)
        core.add(None, Submit(Handle(index), RequestId(str(index)), prompt, num_iterations + 1, sampling), 0)
    taken: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], _T]) -> _T:
        began = time.perf_counter()
        result = work()
        taken.setdefault(name, []).append(1e6 * (time.perf_counter() - began))
        return result

    def send() -> StepColumns | None:
        plan = timed("scheduler: select the iteration", lambda: core.schedule(0))
        if plan is None:
            return None
        data = timed("scheduler: encode the control message", lambda: step_plan_to_pb(plan).SerializeToString())
        message = timed("worker: decode it", lambda: step_columns_from_pb(worker_pb2.StepPlan.FromString(data)))
        timed("worker: prepare the step", lambda: preparer.prepare(message))
        return message

    def result_of(plan: StepColumns) -> StepResult:
        ids = [rng.randrange(vocab_size) for _ in range(int(plan.samples.sum()))]
        outcome = Outcome(plan, 0, 1, 2, ChosenTokens(torch.tensor(ids), ids, [], None))
        data = timed("worker: encode the result", lambda: step_result_to_pb(outcome.result()).SerializeToString())
        timed("worker: note the timing", outcome.timing)
        return timed("scheduler: decode it", lambda: step_result_from_pb(worker_pb2.StepResult.FromString(data)))

    in_flight = [send()]
    for _ in range(num_iterations - 1):
        in_flight.append(send())
        plan = in_flight.pop(0)
        if plan is None:
            break
        result = result_of(plan)
        events = timed("scheduler: apply it", functools.partial(core.apply, result, 0))
        data = timed("scheduler: encode tokens for the gateway", functools.partial(_encode, events))
        timed("gateway: decode them", functools.partial(_decode, data))
    preparer.close()
    return {name: round(statistics.median(times), 1) for name, times in taken.items()}


def _encode(events: list[TokenEvent]) -> bytes:
    handles = [Handle(event.key[1]) for event in events]
    ids = [event.token_id for event in events if event.token_id is not None]
    return session_events_to_pb(SessionEvents(handles, ids)).SerializeToString()


def _decode(data: bytes) -> SessionEvents:
    return session_events_from_pb(scheduler_pb2.SessionEvents.FromString(data))


def _no_tokenizer() -> Tokenizer:
    raise AssertionError("nothing here is guided")


def _no_progress(done: int, total: int) -> None:
    del done, total


def _matrix_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """[n, k] of a layer's matrices, as the decoder has them."""
    attended = config.num_heads * config.head_dim
    qkv = attended + 2 * config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return [(qkv, hidden), (hidden, attended), (2 * inner, hidden), (hidden, inner)]


def _decode_batch(num_sequences: int, context: int) -> ForwardBatch:
    num_blocks = -(-context // _BLOCK)
    tables = np.arange(num_sequences * num_blocks).reshape(num_sequences, num_blocks)
    return ForwardBatch.from_arrays(
        token_ids=np.arange(num_sequences) + 1000,
        positions=np.full(num_sequences, context - 1),
        slot_mapping=tables[:, -1] * _BLOCK + (context - 1) % _BLOCK,
        query_start=np.arange(num_sequences + 1),
        context_lens=np.full(num_sequences, context),
        block_tables=tables,
        sample_rows=np.arange(num_sequences),
        device=_CPU,
    )
