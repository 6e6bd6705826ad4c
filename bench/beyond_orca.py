"""What each switch beyond ORCA buys, on against off in turns in one run: ``python -m bench.beyond_orca``.

Prints one JSON line for each measurement. The synthetic executor has a known step time, so those numbers are of the
scheduler and the planes alone; the others are of the default model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from services.mesh.local_mesh import LocalMesh
from services.mesh.options import MeshOptions
from shared.client import GatewayClient, GenerateOptions
from shared.config import DEFAULT_MODEL, EngineConfig, SchedulingConfig
from shared.topology import Topology
from shared.worker_client import fetch_timeline

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Measure = Callable[[SchedulingConfig], Awaitable[dict[str, Any]]]

DEFAULT = SchedulingConfig()


@contextlib.asynccontextmanager
async def mesh(model: str, scheduling: SchedulingConfig, num_stages: int = 1) -> AsyncIterator[LocalMesh]:
    engine = EngineConfig(model=model, topology=Topology(num_stages), scheduling=scheduling, dtype="float32")
    async with LocalMesh(MeshOptions(engine=engine)) as running:
        yield running


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 250) for _ in range(length)]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def token_times(client: GatewayClient, prompt: list[int], num_tokens: int) -> list[float]:
    """When the request was sent and when each token arrived, seconds."""
    times = [time.monotonic()]
    options = GenerateOptions(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    async for delta in client.generate(prompt, options):
        times += [time.monotonic()] * len(delta.token_ids)
    return times


async def chunked_prefill(model: str, scheduling: SchedulingConfig) -> dict[str, Any]:
    """Token intervals of 16 decoding requests while a prompt of 4,000 tokens arrives."""
    async with mesh(model, scheduling) as running, GatewayClient(running.gateway_address) as client:
        decodes = [asyncio.create_task(token_times(client, prompt_of(16, seed), 150)) for seed in range(16)]
        while (await client.status()).engine.num_output_tokens < 16 * 20:
            pass
        sent, answered = await token_times(client, prompt_of(4000, 99), 1)
        times = await asyncio.gather(*decodes)
        steps = await fetch_timeline(running.worker_addresses[0, 0])
    intervals = [
        1e3 * (later - earlier)
        for request in times
        for earlier, later in itertools.pairwise(request[1:])
        if later >= sent and earlier <= answered
    ]
    full = [1e-6 * (step.ended_ns - step.started_ns) for step in steps if step.num_tokens == scheduling.token_budget]
    return {
        "interval_ms_p50": round(statistics.median(intervals), 2),
        "interval_ms_p99": round(percentile(intervals, 0.99), 2),
        "long_prompt_first_token_ms": round(1e3 * (answered - sent), 1),
        "compute_of_a_full_iteration_ms": round(statistics.median(full), 2) if full else None,
    }


async def prefix_cache(model: str, scheduling: SchedulingConfig) -> dict[str, Any]:
    """First token of a second request that shares 1,000 tokens with the first."""
    async with mesh(model, scheduling) as running, GatewayClient(running.gateway_address) as client:
        first_ms, second_ms = [
            1e3 * (answered - sent)
            for sent, answered in [
                await token_times(client, [*prompt_of(1000, 1), *prompt_of(20, seed)], 1) for seed in (2, 3)
            ]
        ]
    return {"first_request_ms": round(first_ms, 1), "second_request_ms": round(second_ms, 1)}


async def run_ahead(model: str, scheduling: SchedulingConfig) -> dict[str, Any]:
    """Time between two iterations on the compute thread while 16 requests decode."""
    async with mesh(model, scheduling) as running, GatewayClient(running.gateway_address) as client:
        started = time.monotonic()
        await asyncio.gather(*(token_times(client, prompt_of(16, seed), 100) for seed in range(16)))
        seconds = time.monotonic() - started
        steps = [
            step
            for step in await fetch_timeline(running.worker_addresses[0, 0])
            if step.num_sequences == step.num_tokens == 16
        ]
    gaps = [1e-6 * (later.started_ns - earlier.ended_ns) for earlier, later in itertools.pairwise(steps)]
    return {
        "gap_ms_p50": round(statistics.median(gaps), 3),
        "gap_ms_p99": round(percentile(gaps, 0.99), 3),
        "step_ms_p50": round(statistics.median([1e-6 * (step.ended_ns - step.started_ns) for step in steps]), 2),
        "output_tokens_s": round(16 * 100 / seconds, 1),
    }


async def split_over_stages(model: str, scheduling: SchedulingConfig) -> dict[str, Any]:
    """Throughput of 8 requests over two stages, from the first of their tokens to the last."""
    async with mesh(model, scheduling, num_stages=2) as running, GatewayClient(running.gateway_address) as client:
        # Two long prompts fill the pipeline while the eight arrive, so that none of them starts by itself.
        first = [asyncio.create_task(token_times(client, prompt_of(60, seed), 1)) for seed in (101, 102)]
        while (await client.status()).engine.num_in_flight_steps < len(first):
            pass
        times = await asyncio.gather(*(token_times(client, prompt_of(4, seed), 41) for seed in range(8)))
        await asyncio.gather(*first)
    seconds = max(request[-1] for request in times) - min(request[1] for request in times)
    return {"output_tokens_s": round(8 * 40 / seconds, 1)}


def on_model(measure: Callable[[str, SchedulingConfig], Awaitable[dict[str, Any]]], model: str) -> Measure:
    return lambda scheduling: measure(model, scheduling)


MEASUREMENTS: dict[str, tuple[Measure, dict[str, SchedulingConfig]]] = {
    "chunked_prefill_synthetic": (
        on_model(chunked_prefill, "synthetic:step_ms=2,token_us=100"),
        {"off": replace(DEFAULT, chunked_prefill=False), "on": DEFAULT},
    ),
    "chunked_prefill": (
        on_model(chunked_prefill, DEFAULT_MODEL),
        {"off": replace(DEFAULT, chunked_prefill=False), "on": replace(DEFAULT, max_batch_tokens=256)},
    ),
    "prefix_cache": (
        on_model(prefix_cache, DEFAULT_MODEL),
        {"off": replace(DEFAULT, prefix_cache=False), "on": DEFAULT},
    ),
    "run_ahead_synthetic": (
        on_model(run_ahead, "synthetic:step_ms=5"),
        {str(ahead): replace(DEFAULT, run_ahead=ahead) for ahead in (0, 1, 2)},
    ),
    "run_ahead": (
        on_model(run_ahead, DEFAULT_MODEL),
        {str(ahead): replace(DEFAULT, run_ahead=ahead) for ahead in (0, 1, 2)},
    ),
    "split_over_stages_synthetic": (
        on_model(split_over_stages, "synthetic:token_us=5000"),
        {"off": replace(DEFAULT, split_over_stages=False), "on": DEFAULT},
    ),
}


async def main(rounds: int, only: list[str]) -> None:
    for name, (measure, variants) in MEASUREMENTS.items():
        if only and name not in only:
            continue
        for _ in range(rounds):
            for label, scheduling in variants.items():
                print(json.dumps({"measurement": name, "variant": label, **await measure(scheduling)}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="times that each set is measured, in turns")
    parser.add_argument(
        "only", nargs="*", help=f"measurements to make: {', '.join(MEASUREMENTS)}; all where none is named"
    )
    arguments = parser.parse_args()
    asyncio.run(main(arguments.rounds, arguments.only))
