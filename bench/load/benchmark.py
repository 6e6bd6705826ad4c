"""A whole benchmark: warm-up, then one run for each level of load.

Every run draws a trace of its own from the next seed, so that no prompt is in a prefix cache already. The same command
against a server that was not started anew does meet its own prompts there: give another seed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from bench.load.arrivals import poisson_arrivals
from bench.load.client import open_client
from bench.load.metrics import summarize
from bench.load.records import Outcome
from bench.load.runner import run_load
from bench.load.traces import make_trace
from shared.errors import ConfigError, OrcaError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from bench.load.endpoint import Endpoint, LoadClient, ServedModel
    from bench.load.goodput import LatencyBound
    from bench.load.metrics import Summary
    from bench.load.records import RequestRecord
    from bench.load.request_options import RequestOptions
    from bench.load.traces import TraceConfig

__all__ = ["Benchmark", "BenchmarkConfig", "LoadLevel", "Observer", "Run", "check_fits", "run_benchmark"]

_WARMUP_SEED_OFFSET = 1 << 32
"""Far from the seeds of all runs."""


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """How much load: requests per second, requests in flight, or both."""

    request_rate: float | None = None
    """Of arrivals; None: a closed loop."""
    max_concurrency: int | None = None
    """None: no limit; a closed loop then sends everything at once."""

    def __str__(self) -> str:
        limit = "" if self.max_concurrency is None else f"{self.max_concurrency} in flight"
        if self.request_rate is None:
            return limit or "all at once"
        return f"{self.request_rate:g} requests/s" + (limit and f", at most {limit}")


@dataclass(frozen=True, slots=True)
class BenchmarkConfig:
    """What to do."""

    endpoint: Endpoint
    options: RequestOptions
    trace: TraceConfig
    """Of the first run; each other one has the next seed."""
    vocab_size: int
    """Token ids of prompts are below it."""
    levels: Sequence[LoadLevel]
    burstiness: float = 1.0
    num_warmups: int = 1
    """Requests that are sent first and not counted; one that fails ends the benchmark."""
    timeout_s: float | None = None
    """Of each request."""
    bounds: Sequence[LatencyBound] = ()
    """Of goodput."""


@dataclass(frozen=True, slots=True)
class Run:
    """One level of load and what it measured."""

    level: LoadLevel
    seed: int
    summary: Summary
    records: Sequence[RequestRecord]
    client_cpu: float
    """Cores that this process took: near 1, the client was the limit, not the server."""
    was_stopped: bool


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What was done, and its runs; fewer than levels where it was stopped."""

    config: BenchmarkConfig
    runs: Sequence[Run]


class Observer(Protocol):
    """Who watches a benchmark."""

    def run_started(self, level: LoadLevel, num_requests: int) -> None:
        """Take note of a run that begins."""
        ...

    def request_ended(self, record: RequestRecord) -> None:
        """Take note of a request of it that has ended."""
        ...


def check_fits(trace: TraceConfig, model: ServedModel) -> None:
    """Raise ``ConfigError`` where the longest request of a trace is longer than the model's context."""
    if model.max_model_len is not None and trace.max_tokens > model.max_model_len:
        raise ConfigError(
            f"requests of the trace {trace.name.value} have up to {trace.max_tokens} tokens, the context of "
            f"{model.name} has {model.max_model_len}: give a shorter --input-len or --output-len"
        )


async def run_benchmark(config: BenchmarkConfig, observer: Observer, stop: asyncio.Event) -> Benchmark:
    """Do all runs; once ``stop`` is set, the run that is on ends with what it has, and no other begins.

    Raises:
        OrcaError: a warm-up request failed; later failures are counted instead.
        ConfigError: TLS files cannot work, or rates are none.
    """
    runs: list[Run] = []
    async with open_client(config.endpoint, config.options) as client:
        await _warm_up(client, config, stop)
        for index, level in enumerate(config.levels):
            if stop.is_set():
                break
            seed = config.trace.seed + index
            observer.run_started(level, config.trace.num_requests)
            runs.append(await _run(client, config, level, seed, observer, stop))
    return Benchmark(config, runs)


async def _warm_up(client: LoadClient, config: BenchmarkConfig, stop: asyncio.Event) -> None:
    if not config.num_warmups:
        return
    trace_config = replace(config.trace, num_requests=config.num_warmups, seed=config.trace.seed + _WARMUP_SEED_OFFSET)
    trace = make_trace(trace_config, vocab_size=config.vocab_size)
    limit = config.levels[0].max_concurrency if config.levels else None
    for record in await run_load(client, trace, max_concurrency=limit, timeout_s=config.timeout_s, stop=stop):
        if record.outcome is Outcome.FAILED:
            raise OrcaError(f"a warm-up request failed: {record.error}")


async def _run(
    client: LoadClient, config: BenchmarkConfig, level: LoadLevel, seed: int, observer: Observer, stop: asyncio.Event
) -> Run:
    trace = make_trace(replace(config.trace, seed=seed), vocab_size=config.vocab_size)
    arrivals_s = None
    if level.request_rate is not None:
        arrivals_s = poisson_arrivals(len(trace), rate=level.request_rate, seed=seed, burstiness=config.burstiness)
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    records = await run_load(
        client,
        trace,
        arrivals_s=arrivals_s,
        max_concurrency=level.max_concurrency,
        timeout_s=config.timeout_s,
        on_end=observer.request_ended,
        stop=stop,
    )
    client_cpu = (time.process_time() - cpu_began_s) / (time.perf_counter() - began_s)
    return Run(level, seed, summarize(records, config.bounds), records, client_cpu, was_stopped=stop.is_set())
