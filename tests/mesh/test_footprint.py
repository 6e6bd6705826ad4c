"""Gateway and scheduler stay small under load."""

from __future__ import annotations

import asyncio

import psutil

from services.mesh.local_mesh import LocalMesh
from services.mesh.options import MeshOptions
from shared.client import GatewayClient, GenerateOptions
from shared.config import EngineConfig, SchedulingConfig

MIB = 1 << 20
NUM_REQUESTS = 256


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
