"""Several of a kind: gateways on one scheduler, and meshes on one host (R2)."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest

from services.mesh import MeshOptions
from shared.config import EngineConfig, ListenConfig
from shared.topology import Topology
from tests.mesh.live_mesh import LiveMesh, live_mesh

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.slow

OPTIONS = MeshOptions(
    EngineConfig(model="synthetic:step_ms=5", topology=Topology(2)), listen=ListenConfig(port=0), grace_s=2
)
SENTENCE = "the quick brown fox jumps over the lazy dog "


def expected(num_prompt: int, max_tokens: int) -> str:
    return "".join(SENTENCE[position % len(SENTENCE)] for position in range(num_prompt, num_prompt + max_tokens))


async def over_http(live: LiveMesh, num_prompt: int, max_tokens: int) -> str:
    events = await live.stream([65] * num_prompt, max_tokens=max_tokens)
    return "".join(choice["text"] for event in events for choice in event.get("choices", []))


async def over_grpc(live: LiveMesh, num_prompt: int, max_tokens: int) -> str:
    return bytes(await live.generate([65] * num_prompt, max_tokens=max_tokens)).decode()


def load(lives: Sequence[LiveMesh], max_tokens: int) -> list[asyncio.Task[str]]:
    """Requests over both fronts of all gateways, each with a text of its own."""
    return [
        asyncio.create_task(front(live, 1 + at, max_tokens))
        for live in lives
        for at, front in enumerate((over_http, over_grpc, over_http, over_grpc))
    ]


async def test_two_gateways_share_a_scheduler_and_one_outlives_the_other() -> None:
    async with live_mesh(OPTIONS) as first, first.another_gateway() as second:
        texts = await asyncio.gather(*load((first, second), 50))
        assert texts == [expected(1 + at % 4, 50) for at in range(8)]
        lost, kept = load((second,), 4000), load((first,), 150)
        await first.running(8)
        assert (await first.client.status()).num_gateway_requests == 4, "each counts its own"
        second.process("gateway").send_signal(signal.SIGKILL)
        await second.process("gateway").exit
        await first.running(4)
        outcomes = await asyncio.gather(*lost, return_exceptions=True)
        assert all(isinstance(outcome, Exception) for outcome in outcomes), outcomes
        assert await asyncio.gather(*kept) == [expected(1 + at, 150) for at in range(4)]
        await first.idle()
        await first.health(serving=True)


async def test_meshes_of_one_host_start_at_once_and_do_not_mix() -> None:
    async def run(num_prompt: int) -> str:
        async with live_mesh(OPTIONS) as live:
            return await over_grpc(live, num_prompt, 20)

    assert await asyncio.gather(*(run(1 + at) for at in range(3))) == [expected(1 + at, 20) for at in range(3)]
