"""Scenario 39: stages that idle, pause, hang, die or are cut off. Clients see a pause, and the right tokens."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from services.mesh import MeshOptions
from shared.config import EngineConfig, ListenConfig
from shared.topology import Topology
from tests.mesh.live_mesh import LiveMesh, live_mesh
from tests.other_host import OtherHost, other_host

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

HEARTBEAT_S = 2.0
COLLECTIVE_TIMEOUT_S = 5
RECOVERED_S = 60.0
ENGINE = EngineConfig(model="synthetic:step_ms=5", topology=Topology(3), collective_timeout_s=COLLECTIVE_TIMEOUT_S)
OPTIONS = MeshOptions(ENGINE, heartbeat_s=HEARTBEAT_S, grace_s=2)
SENTENCE = b"the quick brown fox jumps over the lazy dog "
"""What the synthetic model says from position 0 on."""


def expected(num_prompt: int, max_tokens: int) -> list[int]:
    return [SENTENCE[position % len(SENTENCE)] for position in range(num_prompt, num_prompt + max_tokens)]


class Load:
    """Requests under way, whose tokens are known beforehand: one that is lost or comes twice shows."""

    def __init__(self, live: LiveMesh, max_tokens: int = 120, num: int = 6) -> None:
        self.max_tokens = max_tokens
        self.tasks = [
            asyncio.create_task(live.generate([65] * (1 + index), max_tokens=max_tokens)) for index in range(num)
        ]

    async def ends_well(self) -> None:
        for index, tokens in enumerate(await asyncio.wait_for(asyncio.gather(*self.tasks), RECOVERED_S)):
            assert tokens == expected(1 + index, self.max_tokens)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def live() -> AsyncIterator[LiveMesh]:
    async with live_mesh(OPTIONS) as running:
        yield running


async def test_a_quiet_hour_is_no_failure(live: LiveMesh) -> None:
    """Idle for longer than any receive may take, then a request at once: nobody waits inside a receive."""
    await live.generate("hello", max_tokens=3)
    epoch = (await live.engine()).epoch
    with pytest.raises(TimeoutError):
        await live.health(serving=False, within_s=COLLECTIVE_TIMEOUT_S + 1)
    began = time.monotonic()
    assert await live.generate([65] * 5, max_tokens=3) == expected(5, 3)
    assert time.monotonic() - began < HEARTBEAT_S
    assert (await live.engine()).epoch == epoch


async def test_a_short_pause_is_a_pause(live: LiveMesh) -> None:
    epoch = (await live.engine()).epoch
    load = Load(live)
    await live.running(6)
    async with live.stopped("stage 1.0"):
        with pytest.raises(TimeoutError):
            await live.health(serving=False, within_s=HEARTBEAT_S / 2)
    await load.ends_well()
    assert (await live.engine()).epoch == epoch


async def test_one_that_hangs_is_found_by_the_heartbeat_not_by_the_collective(live: LiveMesh) -> None:
    epoch = (await live.engine()).epoch
    load = Load(live)
    await live.running(6)
    async with live.stopped("stage 1.0"):
        await live.health(serving=False, within_s=2 * HEARTBEAT_S + 1)
        await live.not_ready_because("stage 1")
        refused = await live.http.post("/v1/completions", json={"prompt": "late"})
        assert refused.status_code == 503
    await load.ends_well()
    await live.health(serving=True, within_s=RECOVERED_S)
    assert (await live.engine()).epoch > epoch
    reasons = [line.fields["message"] for line in live.lines if line.event == "engine_lost"]
    assert "the worker of stage 1, tensor-parallel rank 0 has not answered for 2 s" in str(reasons[-1])


@pytest.mark.asyncio(loop_scope="function")
async def test_one_that_dies_under_load_is_replaced_and_nothing_else_is() -> None:
    async with live_mesh(OPTIONS) as live:
        for name in ("stage 1.0", "stage 0.0"):
            epoch = (await live.engine()).epoch
            load = Load(live)
            await live.running(6)
            await live.lose(name)
            await live.health(serving=False, within_s=2)
            refused = await live.http.post("/v1/completions", json={"prompt": "late"})
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            await live.start_again(name)
            await load.ends_well()
            assert (await live.engine()).epoch > epoch
        survivors = [name for name in ("scheduler", "gateway") if not live.process(name).exit.done()]
        assert survivors == ["scheduler", "gateway"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionsOverTwoHosts(MeshOptions):
    """The last stage runs on another host."""

    host: OtherHost

    def scheduler_command(self) -> list[str]:
        return _at(self.host.our_address, MeshOptions.scheduler_command(self))

    def worker_command(self, scheduler: str, stage: int, tp_rank: int) -> list[str]:
        command = MeshOptions.worker_command(self, scheduler, stage, tp_rank)
        if stage + 1 < self.engine.topology.num_stages:
            return _at(self.host.our_address, command)
        return [*self.host.prefix, *_at(self.host.address, command)]


def _at(host: str, command: list[str]) -> list[str]:
    for option in ("--host", "--advertise-host"):
        if option in command:
            command[command.index(option) + 1] = host
    return command


@pytest.fixture
def host() -> Iterator[OtherHost]:
    with other_host() as made:
        yield made


@pytest.mark.asyncio(loop_scope="function")
async def test_a_cut_between_two_stages_is_found_and_mended(host: OtherHost) -> None:
    engine = replace(ENGINE, topology=Topology(2))
    options = OptionsOverTwoHosts(engine=engine, listen=ListenConfig(), heartbeat_s=HEARTBEAT_S, grace_s=2, host=host)
    async with live_mesh(options) as live:
        load = Load(live)
        await live.running(6)
        host.vanish()
        await live.health(serving=False, within_s=2 * HEARTBEAT_S + 1)
        await live.not_ready_because("stage 1")
        host.come_back()
        await load.ends_well()
        await live.health(serving=True, within_s=RECOVERED_S)
