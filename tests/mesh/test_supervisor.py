"""The supervisor with real services: `orca up` as a user has it, and ``LocalMesh`` as other tests have it.

The model is synthetic: what is tested is processes, not tokens.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from typing import TYPE_CHECKING

import httpx2
import psutil
import pytest

from services.mesh import LocalMesh, MeshError, MeshOptions
from services.mesh.health import check_serving
from shared.client import GatewayClient, GenerateOptions
from shared.config import EngineConfig, ListenConfig
from shared.topology import Topology
from tests.mesh.orca_up import orca_up
from tests.process_end import wait_ended

if TYPE_CHECKING:
    from services.mesh import LogLine

pytestmark = pytest.mark.slow

MODEL = "synthetic:step_ms=1"


async def test_it_serves_and_leaves_nothing_behind() -> None:
    async with orca_up(MODEL, "--stages", "2") as up:
        address = await up.until_ready()
        children = up.children()
        assert len(children) == 4, "scheduler, gateway and two workers"
        async with GatewayClient(address) as client:
            deltas = [delta async for delta in client.generate("hello", GenerateOptions(max_tokens=3, ignore_eos=True))]
        assert sum(len(delta.token_ids) for delta in deltas) == 3
        up.process.send_signal(signal.SIGTERM)
        assert await up.exit_code() == 0
        for child in children:
            await wait_ended(child, timeout_s=1)
    order = [line.partition(" |")[0].strip() for line in up.shown if "service_stopped" in line]
    assert order[:2] == ["gateway", "scheduler"]
    assert sorted(order[2:]) == ["stage 0.0", "stage 1.0"]


async def test_a_worker_that_dies_is_told_and_ends_it() -> None:
    async with orca_up(MODEL) as up:
        await up.until_ready()
        children = up.children()
        (worker,) = (pid for pid in children if "worker" in psutil.Process(pid).cmdline())
        os.kill(worker, signal.SIGKILL)
        assert await up.exit_code() == 1
        for child in children:
            await wait_ended(child, timeout_s=1)
    at = next(at for at, line in enumerate(up.shown) if re.match(r"the last \d+ lines of stage 0.0:", line))
    end = up.shown.index("stage 0.0 was killed by SIGKILL")
    last = up.shown[at + 1 : end]
    assert any("service_listening" in line for line in last)
    assert all(line.startswith("stage 0.0 |") for line in last)
    assert up.shown[end + 1 :] == ["stopped"]


@pytest.mark.parametrize("dying", ["worker", "scheduler"])
async def test_streams_end_with_an_error_where_a_process_dies(dying: str) -> None:
    async with orca_up(MODEL, "--grace", "60") as up:
        await up.until_ready()
        url = next(found[0] for line in up.shown if (found := re.search(r"http://[\d.]+:\d+", line)))
        (victim,) = (pid for pid in up.children() if dying in psutil.Process(pid).cmdline())
        body = {"prompt": "hello", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        events = []
        async with (
            httpx2.AsyncClient(timeout=30) as client,
            client.stream("POST", f"{url}/v1/completions", json=body) as response,
        ):
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
                if len(events) == 1:
                    os.kill(victim, signal.SIGKILL)
        assert await up.exit_code() == 1
    assert json.loads(events[-1])["error"]["code"] == "service_unavailable"
    assert "[DONE]" not in events


async def test_no_signal_to_the_supervisor_leaves_a_child_behind() -> None:
    async with orca_up(MODEL) as up:
        await up.until_ready()
        children = up.children()
        assert len(children) == 3
        up.process.send_signal(signal.SIGKILL)
        await up.exit_code()
        for child in children:
            await wait_ended(child)


async def test_killed_while_it_starts_it_leaves_no_child_behind() -> None:
    async with orca_up(MODEL) as up:
        await up.until("service_listening")
        children = up.children()
        up.process.send_signal(signal.SIGKILL)
        await up.exit_code()
        for child in children:
            await wait_ended(child, timeout_s=30)


async def test_it_can_be_stopped_while_it_starts() -> None:
    async with orca_up(MODEL) as up:
        await up.until("service_listening")
        children = up.children()
        up.process.send_signal(signal.SIGINT)
        assert await up.exit_code() == 0
        for child in children:
            await wait_ended(child, timeout_s=1)


async def test_a_second_signal_does_not_wait() -> None:
    async with orca_up(MODEL, "--grace", "600") as up, GatewayClient(await up.until_ready()) as client:
        running = client.generate("hello", GenerateOptions(max_tokens=8000, ignore_eos=True))
        await anext(running)
        up.process.send_signal(signal.SIGINT)
        await up.until("draining; Ctrl-C again")
        up.process.send_signal(signal.SIGINT)
        assert await up.exit_code() == 128 + signal.SIGINT
        await running.aclose()


async def test_a_port_in_use_is_told_before_anything_is_started() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with orca_up(MODEL, "--grpc-port", str(port)) as up:
            assert await up.exit_code() == 1
    (line,) = up.shown
    assert line.startswith(f"error: port {port} of 127.0.0.1 is in use: stop the program that listens there")
    assert "another port with --grpc-port" in line


async def test_a_model_that_cannot_be_loaded_is_told_in_words() -> None:
    async with orca_up("random:no-such-shape") as up:
        assert await up.exit_code() == 1
    assert not [line for line in up.shown if "Traceback" in line]
    assert "no-such-shape" in up.shown[-2]
    assert "exited with code 1" in up.shown[-2]


@pytest.fixture
def options() -> MeshOptions:
    return MeshOptions(EngineConfig(model=MODEL, topology=Topology(1, 2)), grace_s=5)


async def test_a_mesh_for_a_block_of_code(options: MeshOptions) -> None:
    lines: list[LogLine] = []
    async with LocalMesh(options, lines.append) as mesh:
        assert set(mesh.processes) == {"scheduler", "gateway", "stage 0.0", "stage 0.1"}
        assert set(mesh.worker_addresses) == {(0, 0), (0, 1)}
        for address in (mesh.gateway_address, mesh.scheduler_address, *mesh.worker_addresses.values()):
            await check_serving(address)
        async with GatewayClient(mesh.gateway_address) as client:
            status = await client.status()
        assert {(worker.stage, worker.tp_rank): worker.address for worker in status.engine.workers} == (
            mesh.worker_addresses
        )
    assert all(process.exit.result().returncode == 0 for process in mesh.processes.values())
    assert {line.service for line in lines} == set(mesh.processes)


async def test_who_ends_inside_the_block_is_told(options: MeshOptions) -> None:
    async with LocalMesh(options) as mesh:
        mesh.processes["gateway"].send_signal(signal.SIGKILL)
        service_exit = await mesh.first_exit()
        assert service_exit.summary == "gateway was killed by SIGKILL"


async def test_a_mesh_that_cannot_start_leaves_nothing_behind() -> None:
    mesh = LocalMesh(MeshOptions(EngineConfig(model="random:no-such-shape")))
    with pytest.raises(MeshError, match="no-such-shape"):
        async with mesh:
            pytest.fail("it cannot serve")
    assert all(process.exit.done() for process in mesh.processes.values())


async def test_a_mesh_tells_of_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = MeshOptions(EngineConfig(model=MODEL), listen=ListenConfig(port=taken.getsockname()[1]))
        mesh = LocalMesh(options)
        with pytest.raises(MeshError, match="is in use"):
            await mesh.start()
        assert mesh.processes == {}
