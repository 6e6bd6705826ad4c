"""Scenario 40: whoever is asked to leave does so in good order, and a cut never looks like an end."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil
import pytest

from services.mesh import LocalMesh, MeshOptions
from shared.client import GenerateOptions
from shared.config import EngineConfig, HttpConfig, ListenConfig, SchedulingConfig
from shared.errors import UnavailableError
from shared.topology import Topology
from tests.mesh.live_mesh import SOON_S, LiveMesh, live_mesh

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_in_shared_memory")]

NUM_RUNNING, NUM_WAITING = 8, 4
ENGINE = EngineConfig(
    model="synthetic:step_ms=20",
    topology=Topology(2),
    scheduling=SchedulingConfig(max_batch_size=NUM_RUNNING // 2),  # on each of two stages
)
OPTIONS = MeshOptions(ENGINE, grace_s=60)
SHORT, ENDLESS = 40, 8000


class Load:
    """Streams over both fronts, more than run at once."""

    def __init__(self, live: LiveMesh, max_tokens: int) -> None:
        num = NUM_RUNNING + NUM_WAITING
        self.grpc = [asyncio.create_task(self._grpc(live, max_tokens)) for _ in range(num // 2)]
        self.http = [asyncio.create_task(self._http(live, max_tokens)) for _ in range(num // 2)]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self.grpc, *self.http]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    async def _grpc(live: LiveMesh, max_tokens: int) -> str:
        options = GenerateOptions(max_tokens=max_tokens, ignore_eos=True)
        try:
            async for delta in live.client.generate("hello", options):
                if delta.finish is not None:
                    return delta.finish.reason.name.lower()
        except UnavailableError as error:
            return f"error: {error}"
        return "nothing"

    @staticmethod
    async def _http(live: LiveMesh, max_tokens: int) -> str:
        events = await live.stream("hello", max_tokens=max_tokens)
        if "error" in events[-1]:
            assert not [
                event for event in events if any(choice["finish_reason"] for choice in event.get("choices", []))
            ]
            return f"error: {events[-1]['error']['message']}"
        assert events[-1] == {}, "[DONE]"
        return str(events[-2]["choices"][0]["finish_reason"])

    async def outcomes(self) -> list[str]:
        return await asyncio.gather(*self.grpc, *self.http)


async def refused(live: LiveMesh) -> None:
    """New requests are refused over both fronts, as those that may come again."""
    answer = await live.http.post("/v1/completions", json={"prompt": "late", "max_tokens": 1})
    assert answer.status_code == 503, answer.text
    assert answer.headers["retry-after"]
    with pytest.raises(UnavailableError):
        await live.generate("late", max_tokens=1)


async def all_left(live: LiveMesh, names: Sequence[str]) -> None:
    for name in names:
        left = await asyncio.wait_for(live.process(name).exit, SOON_S)
        assert left.returncode == 0, left


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.fixture
def nothing_in_shared_memory() -> Iterator[None]:
    before = shared_memory()
    yield
    assert shared_memory() <= before


async def test_a_gateway_lets_all_it_has_accepted_end() -> None:
    async with live_mesh(replace(OPTIONS, max_requests=NUM_RUNNING)) as live, Load(live, SHORT) as load:
        await live.running(NUM_RUNNING)
        await live.accepted(NUM_RUNNING + NUM_WAITING)
        live.process("gateway").send_signal(signal.SIGTERM)
        await live.health(serving=False)
        await refused(live)
        assert await load.outcomes() == ["length"] * (NUM_RUNNING + NUM_WAITING), "those that wait at the gateway too"
        await all_left(live, ["gateway"])


async def test_all_at_once_as_a_terminal_or_an_init_system_does() -> None:
    async with live_mesh(OPTIONS) as live, Load(live, SHORT) as load:
        await live.running(NUM_RUNNING, waiting=NUM_WAITING)
        for name in live.mesh.processes:
            live.process(name).send_signal(signal.SIGTERM)
        await live.health(serving=False)
        await refused(live)
        assert await load.outcomes() == ["length"] * (NUM_RUNNING + NUM_WAITING)
        await all_left(live, list(live.mesh.processes))


async def test_one_process_leaves_when_the_engine_is_done_and_may_be_replaced() -> None:
    reasons = {
        "stage 1.0": "the worker of stage 1, tensor-parallel rank 0 is leaving",
        "scheduler": "the scheduler is shutting down",
    }
    async with live_mesh(OPTIONS) as live:
        for name, reason in reasons.items():
            async with Load(live, SHORT) as load:
                await live.running(NUM_RUNNING, waiting=NUM_WAITING)
                live.process(name).send_signal(signal.SIGTERM)
                await live.health(serving=False)
                await live.not_ready_because(reason)
                await refused(live)
                assert await load.outcomes() == ["length"] * (NUM_RUNNING + NUM_WAITING)
                await all_left(live, [name])
            await live.start_again(name)
            await live.health(serving=True, within_s=60)
            assert len(await live.generate("hello", max_tokens=3)) == 3


async def test_what_does_not_end_in_time_ends_in_an_error_whoever_is_asked() -> None:
    async with live_mesh(replace(OPTIONS, grace_s=1, max_requests=NUM_RUNNING)) as live, Load(live, ENDLESS) as load:
        await live.running(NUM_RUNNING)
        await live.accepted(NUM_RUNNING + NUM_WAITING)
        for name in live.mesh.processes:
            live.process(name).send_signal(signal.SIGTERM)
        outcomes = await asyncio.wait_for(load.outcomes(), SOON_S)
        assert all(outcome.startswith("error: ") for outcome in outcomes), outcomes
        await all_left(live, list(live.mesh.processes))


async def test_a_second_signal_is_now() -> None:
    async with live_mesh(OPTIONS) as live, Load(live, ENDLESS):
        await live.running(NUM_RUNNING, waiting=NUM_WAITING)
        for name in live.mesh.processes:
            live.process(name).send_signal(signal.SIGTERM)
        await live.health(serving=False)
        for name in live.mesh.processes:
            live.process(name).send_signal(signal.SIGTERM)
        for process in live.mesh.processes.values():
            assert (await asyncio.wait_for(process.exit, 3)).returncode == 128 + signal.SIGTERM


async def test_while_the_model_is_loading() -> None:
    loading = asyncio.Event()
    mesh = LocalMesh(
        MeshOptions(EngineConfig(model="random:gpt2", topology=Topology(2))),
        lambda line: loading.set() if line.event == "loading" else None,
    )
    await mesh.start()
    try:
        await asyncio.wait_for(loading.wait(), 60)
        for process in mesh.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in mesh.processes.values():
            assert (await asyncio.wait_for(process.exit, SOON_S)).returncode == 0
    finally:
        await mesh.kill()


def listening_ports() -> set[int]:
    """Of all processes of this host."""
    return {
        connection.laddr.port
        for connection in psutil.net_connections()
        if connection.laddr and connection.status == psutil.CONN_LISTEN
    }


async def test_the_same_ports_are_free_at_once() -> None:
    async with live_mesh(OPTIONS) as live, Load(live, ENDLESS):
        await live.running(NUM_RUNNING, waiting=NUM_WAITING)
        grpc_port = int(live.mesh.gateway_address.rpartition(":")[2])
        http_port = int(live.mesh.http_address.rpartition(":")[2])
        await live.mesh.kill()
        assert not listening_ports() & {grpc_port, http_port}
        options = replace(OPTIONS, listen=ListenConfig(port=grpc_port), http=HttpConfig(ListenConfig(port=http_port)))
        async with live_mesh(options) as again:
            assert again.mesh.gateway_address.endswith(f":{grpc_port}")
            assert len(await again.generate("hello", max_tokens=3)) == 3
