"""A mesh of real processes with clients of both fronts, whose processes can be hurt, lost and started again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.mesh import LocalMesh, MeshOptions
from services.mesh.process import ServiceProcess
from shared.client import GatewayClient, GenerateOptions
from shared.config import ListenConfig
from shared.rpc import connect
from tests.exposition import Exposition

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.mesh import LogLine
    from shared.messages import EngineStatus

__all__ = ["LiveMesh", "clients_of", "live_mesh"]

SERVING = health_pb2.HealthCheckResponse.SERVING
SOON_S = 10.0
"""For what takes milliseconds on a machine that has nothing else to do."""


@dataclass
class LiveMesh:
    """The mesh, and what tests do to it."""

    mesh: LocalMesh
    client: GatewayClient
    http: httpx2.AsyncClient
    lines: list[LogLine] = field(default_factory=list)
    """All that its processes have logged."""

    def process(self, name: str) -> ServiceProcess:
        return self.mesh.processes[name]

    async def health(self, *, serving: bool, within_s: float = SOON_S) -> str:
        """Wait until the gateway says so over gRPC; HTTP must agree then. Returns what is missing."""
        async with asyncio.timeout(within_s), connect(self.mesh.gateway_address) as channel:
            call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            async for answer in call:
                if (answer.status == SERVING) is serving:
                    call.cancel()
                    break
        ready = await self.http.get("/ready")
        assert ready.status_code == (200 if serving else 503), ready.text
        assert (await self.http.get("/health")).status_code == 200, "it lives"
        reason: str = ready.json().get("reason") or ""
        return reason

    async def not_ready_because(self, text: str, within_s: float = SOON_S) -> None:
        """Wait until ``/ready`` gives a reason."""
        said = ""
        try:
            async with asyncio.timeout(within_s):
                while text not in said:
                    said = (await self.http.get("/ready")).text
        except TimeoutError:
            pytest.fail(f"{text!r} is not in {said!r}")

    async def engine(self) -> EngineStatus:
        return (await self.client.status()).engine

    async def idle(self, within_s: float = SOON_S) -> None:
        """Wait for the baseline: nothing in service, in the engine or in K/V."""
        async with asyncio.timeout(within_s):
            while True:
                status = await self.client.status()
                engine = status.engine
                if not (
                    status.num_gateway_requests or engine.num_running or engine.num_waiting or engine.num_used_slots
                ):
                    return

    async def running(self, num: int, *, waiting: int = 0) -> None:
        """Wait until so many requests are in the engine's batch, and wait for it."""
        async with asyncio.timeout(SOON_S):
            while True:
                engine = await self.engine()
                if (engine.num_running, engine.num_waiting) == (num, waiting):
                    return

    async def accepted(self, num: int) -> None:
        """Wait until the gateway has so many requests, those that wait in its queue included."""
        async with asyncio.timeout(SOON_S):
            while (await self.client.status()).num_gateway_requests != num:
                pass

    async def generate(self, prompt: str | list[int], **options: Any) -> list[int]:
        """Continue a prompt over gRPC to its end; the tokens are returned."""
        chosen = GenerateOptions(**{"temperature": 0.0, "ignore_eos": True, **options})
        return [token async for delta in self.client.generate(prompt, chosen) for token in delta.token_ids]

    async def stream(self, prompt: str | list[int], **options: Any) -> list[dict[str, Any]]:
        """Continue a prompt over HTTP to its end; the events are returned, ``[DONE]`` as an empty one.

        Where there is no room before it begins, that error is the only event.
        """
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "stream": True, **options}
        events = []
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code == 503:
                return [json.loads(await response.aread())]
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    events.append(json.loads(data) if data != "[DONE]" else {})
        return events

    async def num_ended(self, reason: str) -> float:
        """Requests that ended so at the gateway, by its metrics."""
        exposition = Exposition.of((await self.http.get("/metrics")).text)
        return sum(
            value for labels, value in exposition.values("orca_requests_ended_total") if labels["reason"] == reason
        )

    async def lose(self, name: str) -> None:
        """Kill a process."""
        self.process(name).send_signal(signal.SIGKILL)
        await self.process(name).exit

    async def start_again(self, name: str) -> None:
        """Start a process that has ended; the scheduler and the gateway at the ports that they had."""
        await self.mesh._spawn(name, self._command(name))
        await self.process(name).listening()

    @contextlib.asynccontextmanager
    async def stopped(self, name: str) -> AsyncIterator[None]:
        """Stop a process (SIGSTOP) for as long as the block lasts."""
        self.process(name).send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process(name).send_signal(signal.SIGCONT)

    @contextlib.asynccontextmanager
    async def another_gateway(self) -> AsyncIterator[LiveMesh]:
        """Start a gateway more, with clients of its own; it leaves at the end."""
        options = replace(self.mesh.options, listen=ListenConfig())
        command = options.gateway_command(self.mesh.scheduler_address)
        process = await ServiceProcess.start("gateway 2", command, os.environ, self.lines.append)
        other = LocalMesh(options)
        other.processes = {**self.mesh.processes, "gateway": process}
        try:
            other.gateway_address = await process.listening()
            other.http_address = process.http_address
            await process.ready()
            async with clients_of(other, self.lines) as live:
                yield live
        finally:
            await process.stop(SOON_S)

    def _command(self, name: str) -> list[str]:
        options, scheduler = self.mesh.options, self.mesh.scheduler_address
        match name.split():
            case ["scheduler"]:
                command = options.scheduler_command()
                command[command.index("--port") + 1] = scheduler.rpartition(":")[2]
            case ["gateway"]:
                command = options.gateway_command(scheduler)
                command[command.index("--port") + 1] = self.mesh.gateway_address.rpartition(":")[2]
                command[command.index("--http-port") + 1] = self.mesh.http_address.rpartition(":")[2]
            case ["stage", place]:
                stage, tp_rank = map(int, place.split("."))
                command = options.worker_command(scheduler, stage, tp_rank)
        return command


@contextlib.asynccontextmanager
async def live_mesh(options: MeshOptions) -> AsyncIterator[LiveMesh]:
    """Run a mesh for as long as the block lasts."""
    lines: list[LogLine] = []
    async with LocalMesh(options, lines.append) as mesh, clients_of(mesh, lines) as live:
        yield live


@contextlib.asynccontextmanager
async def clients_of(mesh: LocalMesh, lines: list[LogLine]) -> AsyncIterator[LiveMesh]:
    limits = httpx2.Limits(max_connections=None)
    async with (
        GatewayClient(mesh.gateway_address) as client,
        httpx2.AsyncClient(base_url=mesh.http_address, timeout=60, limits=limits) as http,
    ):
        yield LiveMesh(mesh, client, http, lines)
