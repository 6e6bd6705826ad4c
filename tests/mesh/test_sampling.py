"""Sampled output depends on the seed and the position alone: not on neighbours, chunks, preemption or topology."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from services.mesh.local_mesh import LocalMesh
from services.mesh.options import MeshOptions
from shared.client import GatewayClient, GenerateOptions
from shared.config import EngineConfig, SchedulingConfig
from shared.generation import Guidance, GuidanceKind
from shared.topology import Topology

RNG = random.Random(5)
PROMPTS = [[RNG.randrange(256) for _ in range(length)] for length in (3, 40, 90, 17, 64, 5, 120, 33)]
WISHES = (
    GenerateOptions(ignore_eos=True),
    GenerateOptions(ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.4, num_logprobs=2),
    GenerateOptions(guidance=Guidance(GuidanceKind.REGEX, "([a-z]{1,9} ){20}")),
    GenerateOptions(min_tokens=50, presence_penalty=1.0, logit_bias={256: 9.0, 7: 3.0}),
)
"""What each request wants besides: what it is told of its own output must survive a recomputation."""


async def sample(engine: EngineConfig, *, together: bool) -> tuple[list[list[int]], int]:
    """What each prompt gets with a seed of its own, and how often somebody was preempted."""
    async with LocalMesh(MeshOptions(engine=engine)) as mesh, GatewayClient(mesh.gateway_address) as client:

        async def run(seed: int, prompt: list[int]) -> list[int]:
            options = replace(WISHES[seed % len(WISHES)], max_tokens=60, temperature=0.9, top_k=8, seed=seed)
            return [token async for delta in client.generate(prompt, options) for token in delta.token_ids]

        if together:
            outputs = await asyncio.gather(*(run(seed, prompt) for seed, prompt in enumerate(PROMPTS)))
        else:
            outputs = [await run(seed, prompt) for seed, prompt in enumerate(PROMPTS)]
        return outputs, (await client.status()).engine.num_preemptions


@pytest.mark.slow
async def test_the_same_seed_gives_the_same_tokens_whatever_else_happens() -> None:
    model = "random:tiny-llama"
    alone, num_preemptions = await sample(EngineConfig(model=model), together=False)
    assert num_preemptions == 0
    assert len({tuple(output) for output in alone}) == len(alone)
    # 6 layers, K and V, 4 heads of 8, 4 bytes: 1,536 bytes a token; room for two of the longest.
    tight = EngineConfig(
        model=model,
        kv_memory_bytes=1536 * 304,
        block_size=4,
        scheduling=SchedulingConfig(max_batch_tokens=48, max_batch_size=16),
    )
    crowded, num_preemptions = await sample(tight, together=True)
    assert num_preemptions > 0
    assert crowded == alone
    split, _ = await sample(EngineConfig(model=model, topology=Topology(2, 2)), together=True)
    assert split == alone
