"""The default model as it is served by default on a CPU: in the 4 and 8 bits of its file."""

from __future__ import annotations

import asyncio

import pytest

from kernels.native.library import KernelsUnavailableError, load
from services.mesh.local_mesh import LocalMesh
from services.mesh.options import MeshOptions
from shared.client import GatewayClient
from shared.completion import collect_async
from shared.config import DEFAULT_MODEL, EngineConfig, SchedulingConfig
from shared.generation import GenerateOptions
from shared.topology import Topology

PROMPTS = ["The capital of France is", "Water boils at", "Once upon a time, in a land far away, there was"]
OPTIONS = GenerateOptions(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize("topology", [Topology(1, 1), Topology(2, 1), Topology(1, 2)], ids=str)
async def test_the_default_model_by_default(topology: Topology) -> None:
    try:
        load()
    except KernelsUnavailableError as error:
        pytest.skip(str(error))
    scheduling = SchedulingConfig(prefix_cache=False, max_batch_size=16, max_batch_tokens=32)
    engine = EngineConfig(model=DEFAULT_MODEL, topology=topology, scheduling=scheduling)
    async with LocalMesh(MeshOptions(engine=engine)) as mesh, GatewayClient(mesh.gateway_address) as client:
        info = (await client.model_info()).engine
        assert info.dtype == "int8"
        first, again = [
            [(await collect_async(client.generate(prompt, OPTIONS))).choices[0].text for prompt in PROMPTS]
            for _ in range(2)
        ]
        together = await asyncio.gather(*(collect_async(client.generate(prompt, OPTIONS)) for prompt in PROMPTS))
    assert first[0].startswith(" Paris")
    assert again == first, "the same request in the same circumstances"
    # An iteration of few tokens uses weights of 4 bits, one of many those of 8: near each other, but not the same.
    assert together[0].choices[0].text.startswith(" Paris")
    assert all(completion.usage.num_output_tokens == OPTIONS.max_tokens for completion in together)
