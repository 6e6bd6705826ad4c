"""The default model as it is served by default on a CPU: in the 4 and 8 bits of its file."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kernels.native.library import KernelsUnavailableError, NativeKernels, load
from shared.client import GatewayClient
from shared.completion import Choice, collect_async
from shared.config import DEFAULT_MODEL, EngineConfig, SchedulingConfig
from shared.generation import GenerateOptions
from shared.topology import Topology
from tests.mesh.kept_workers import KeptWorkers

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPTS = ["The capital of France is", "Water boils at", "Once upon a time, in a land far away, there was"]
OPTIONS = GenerateOptions(max_tokens=12, temperature=0.0, ignore_eos=True)
SCORED = replace(OPTIONS, num_logprobs=5)
NEAR = 1.0
"""Nats by which a token that weights of 8 bits choose may be less likely than the choice of those of 4."""


async def outputs(client: GatewayClient, options: GenerateOptions = OPTIONS, *, together: bool) -> list[Choice]:
    async def output(prompt: str) -> Choice:
        return (await collect_async(client.generate(prompt, options))).choices[0]

    return await asyncio.gather(*map(output, PROMPTS)) if together else [await output(prompt) for prompt in PROMPTS]


def tokens(choices: Sequence[Choice]) -> list[tuple[int, ...]]:
    return [choice.token_ids for choice in choices]


def assert_same_or_near(likely: Sequence[Choice], actual: Sequence[Choice]) -> None:
    """The same tokens up to one that was nearly as likely as the best."""
    for scored, other in zip(likely, actual, strict=True):
        assert len(other.token_ids) == len(scored.token_ids) == OPTIONS.max_tokens
        for best, token_id in zip(scored.logprobs, other.token_ids, strict=True):
            if best.token_id == token_id:
                continue
            found = {top.token_id: top.logprob for top in best.top}
            assert best.logprob is not None
            assert found.get(token_id, float("-inf")) > best.logprob - NEAR, (best, token_id)
            break  # what follows another token cannot be compared


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    try:
        return load()
    except KernelsUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("topology", [Topology(1, 1), Topology(2, 1), Topology(1, 2)], ids=str)
async def test_the_default_model_by_default(topology: Topology, kernels: NativeKernels) -> None:
    scheduling = SchedulingConfig(prefix_cache=False, max_batch_size=kernels.few_rows)
    engine = EngineConfig(model=DEFAULT_MODEL, topology=topology, scheduling=scheduling)
    async with KeptWorkers(topology) as workers:
        few = replace(engine, scheduling=replace(scheduling, max_batch_tokens=kernels.few_rows))
        async with workers.mesh(few) as mesh, GatewayClient(mesh.gateway_address) as client:
            assert (await client.model_info()).engine.dtype == "int8"
            alone = await outputs(client, together=False)
            together = await outputs(client, together=True)
            scored = await outputs(client, SCORED, together=False)
        async with workers.mesh(engine) as mesh, GatewayClient(mesh.gateway_address) as client:
            many = await outputs(client, together=True)
    assert alone[0].text.startswith(" Paris")
    # An iteration of few tokens has weights of 4 bits; as long as all have, neighbours change nothing.
    assert tokens(alone) == tokens(together) == tokens(scored)
    assert_same_or_near(scored, many)
