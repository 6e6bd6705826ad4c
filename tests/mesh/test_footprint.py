"""What a mesh costs: memory of its processes under load, and the time until it is ready."""

from __future__ import annotations

import asyncio
import re
import time
from typing import NamedTuple

import psutil
import pytest

from kernels.native.library import KernelsUnavailableError, load
from services.mesh.local_mesh import LocalMesh
from services.mesh.options import MeshOptions
from shared.client import GatewayClient, GenerateOptions
from shared.config import DEFAULT_MODEL, EngineConfig, SchedulingConfig
from tests.mesh.orca_up import OrcaUp, orca_up

MIB = 1 << 20
NUM_REQUESTS = 256

READY_S = 8.0
"""From the command to readiness, installed and cached, on a machine that does nothing else."""
NUM_CORES = 2
"""Of the smallest machine that this is promised for."""
BUSY_READY_S = 24.0
"""The bound where others use the machine: three times as long, while the work itself stays as little."""

KV_MIB = 128
WORKER_MIB = 500
"""What a worker may have besides weights and K/V: the libraries alone take half."""


async def test_resident_memory_under_load() -> None:
    engine = EngineConfig(model="synthetic:step_ms=10", scheduling=SchedulingConfig(max_batch_size=NUM_REQUESTS))
    options = MeshOptions(engine=engine)
    async with LocalMesh(options) as mesh, GatewayClient(mesh.gateway_address) as client:
        prompt = [65] * 400

        async def run() -> int:
            deltas = client.generate(prompt, GenerateOptions(max_tokens=64, ignore_eos=True))
            return sum([len(delta.token_ids) async for delta in deltas])

        requests = [asyncio.create_task(run()) for _ in range(NUM_REQUESTS)]
        while (await client.status()).engine.num_running < NUM_REQUESTS // 2:
            pass
        resident = {name: psutil.Process(process.pid).memory_info().rss for name, process in mesh.processes.items()}
        assert await asyncio.gather(*requests) == [64] * NUM_REQUESTS
    assert resident["gateway"] < 300 * MIB
    assert resident["scheduler"] < 120 * MIB


class Start(NamedTuple):
    """What it took until the mesh was ready."""

    wall_s: float
    cpu_s: float
    """Of all its processes."""

    @property
    def is_quick(self) -> bool:
        """In 8 s; or, on a busy machine, in 24 s with no more work than two cores do in 8."""
        return self.wall_s < READY_S or (self.cpu_s < NUM_CORES * READY_S and self.wall_s < BUSY_READY_S)


@pytest.mark.slow
async def test_the_default_model_is_soon_ready_and_its_worker_small() -> None:
    try:
        load()  # compiled by now
    except KernelsUnavailableError as error:
        pytest.skip(str(error))
    before = time.monotonic()
    async with orca_up(DEFAULT_MODEL, "--kv-memory", f"{KV_MIB}MiB", "--max-batch-size", "64") as up:
        address = await up.until_ready()
        start = Start(time.monotonic() - before, sum(map(cpu_seconds, [up.process.pid, *up.children()])))
        assert start.is_quick, (start, *up.shown)
        worker, weights_bytes = worker_of(up)
        limit = weights_bytes + (KV_MIB + WORKER_MIB) * MIB
        assert worker.memory_info().rss < limit - KV_MIB * MIB, "idle, no K/V is written"
        async with GatewayClient(address) as client:
            requests = asyncio.gather(*(generate(client, number) for number in range(64)))
            resident = [0]
            while not requests.done():
                resident.append(worker.memory_info().rss)
                await asyncio.wait([requests], timeout=0.1)
            await requests
        assert max(resident) < limit, f"{max(resident) / MIB:.0f} MiB, of which weights {weights_bytes / MIB:.0f}"


async def generate(client: GatewayClient, number: int) -> None:
    """Ask for what needs the most memory: draws of all kinds, log probabilities, penalties."""
    kinds = (
        GenerateOptions(max_tokens=16, temperature=0.0, ignore_eos=True),
        GenerateOptions(max_tokens=16, temperature=0.8, top_p=0.95, ignore_eos=True),
        GenerateOptions(max_tokens=16, num_logprobs=5, ignore_eos=True),
        GenerateOptions(max_tokens=16, top_k=50, presence_penalty=1.0, ignore_eos=True),
    )
    prompt = [100 + number, *range(1000, 1063)]
    async for _ in client.generate(prompt, kinds[number % len(kinds)]):
        pass


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def worker_of(up: OrcaUp) -> tuple[psutil.Process, int]:
    """Return the one worker, and what its weights take by its own word."""
    weights = [match for line in up.shown if (match := re.search(r"worker_joined .*weights_bytes=(\d+)", line))]
    children = map(psutil.Process, up.children())
    (worker,) = (child for child in children if "worker" in child.cmdline())
    return worker, int(weights[-1][1])
