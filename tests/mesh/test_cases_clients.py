"""Scenario 30: whoever leaves, however and whenever, takes the work along; who only stops sending does not.

Clients whose host vanishes are in ``tests/service/gateway/test_cases_vanishing.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from services.mesh import MeshOptions
from shared.client import GatewayClient, GenerateOptions
from shared.config import EngineConfig, SchedulingConfig
from tests.mesh.live_mesh import LiveMesh, live_mesh

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

NUM_ROUNDS = 10
SOON_S = 1.0
"""For everything to be as before, an iteration aside."""
PREFILL = [65] * 500
PREFILL_S = 0.5

HTTP_CLIENT = """
import http.client, sys
connection = http.client.HTTPConnection(sys.argv[1])
connection.request("POST", "/v1/completions", sys.argv[2], {"Content-Type": "application/json"})
response = connection.getresponse()
while response.read1():
    print("received", flush=True)
"""
GRPC_CLIENT = """
import sys
from shared.sync_client import SyncGatewayClient
with SyncGatewayClient(sys.argv[1]) as client:
    for delta in client.generate("x"):
        print("received", flush=True)
"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def live() -> AsyncIterator[LiveMesh]:
    scheduling = SchedulingConfig(max_batch_size=2, max_batch_tokens=1024, prefix_cache=False)
    engine = EngineConfig(model="synthetic:step_ms=5,token_us=1000", scheduling=scheduling)
    async with live_mesh(MeshOptions(engine, max_requests=3, grace_s=1)) as running:
        yield running


@dataclass
class HttpRequest:
    """A request on a connection of its own."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def send(cls, live: LiveMesh, **fields: Any) -> HttpRequest:
        url = live.http.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        body = json.dumps({"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True} | fields)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(f"{head}\r\n\r\n{body}".encode())
        return cls(reader, writer)

    def leave(self) -> None:
        self.writer.transport.abort()


@dataclass
class GrpcRequest:
    """A call on a connection that others share."""

    deltas: AsyncGenerator[Any, None]
    asking: asyncio.Task[Any]

    @classmethod
    async def send(cls, live: LiveMesh, prompt: str | list[int] = "x", max_tokens: int = 4000) -> GrpcRequest:
        deltas = live.client.generate(prompt, GenerateOptions(max_tokens=max_tokens, ignore_eos=True))
        return cls(deltas, asyncio.create_task(anext(deltas)))

    async def leave(self) -> None:
        self.asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.asking
        await self.deltas.aclose()


@contextlib.asynccontextmanager
async def back_to_normal(live: LiveMesh, num_leaving: int) -> AsyncIterator[None]:
    """What happens in the block must be over soon, and each that leaves counted once."""
    num_cancelled = await live.num_ended("cancelled")
    began = time.monotonic()
    yield
    await live.idle(SOON_S + PREFILL_S + (time.monotonic() - began))
    assert await live.num_ended("cancelled") == num_cancelled + num_leaving


async def test_while_they_wait(live: LiveMesh) -> None:
    """One in the scheduler, and two more before the gateway's own limit, streamed and not."""
    running = [await HttpRequest.send(live) for _ in range(2)]
    await live.running(2)
    for _ in range(NUM_ROUNDS):
        before = await live.num_ended("cancelled")
        waiting = [await HttpRequest.send(live)]
        await live.running(2, waiting=1)
        waiting += [await HttpRequest.send(live, stream=False), await HttpRequest.send(live)]
        waiting_call = await GrpcRequest.send(live)
        async with asyncio.timeout(SOON_S):
            while (await live.client.status()).num_gateway_requests != 6:
                pass
        for request in waiting:
            request.leave()
        await waiting_call.leave()
        async with asyncio.timeout(SOON_S):
            while (await live.client.status()).num_gateway_requests != 2:
                pass
        await live.running(2)
        assert await live.num_ended("cancelled") == before + 4
    async with back_to_normal(live, 2):
        for request in running:
            request.leave()


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "unstreamed"])
async def test_in_prefill_and_in_mid_output_over_http(live: LiveMesh, stream: bool) -> None:
    for round_ in range(NUM_ROUNDS):
        in_prefill = round_ % 2 == 0
        async with back_to_normal(live, 1):
            before = (await live.engine()).num_output_tokens
            request = await HttpRequest.send(live, prompt=PREFILL if in_prefill else "x", stream=stream)
            await live.running(1)
            if not in_prefill:
                async with asyncio.timeout(SOON_S):
                    while (await live.engine()).num_output_tokens < before + 3:
                        pass
            request.leave()


async def test_in_prefill_and_in_mid_output_over_grpc(live: LiveMesh) -> None:
    for round_ in range(NUM_ROUNDS):
        async with back_to_normal(live, 1):
            request = await GrpcRequest.send(live, PREFILL if round_ % 2 == 0 else "x")
            await live.running(1)
            if round_ % 2:
                await request.asking
                while not (await anext(request.deltas)).text:
                    pass
            await request.leave()


async def test_killed_clients(live: LiveMesh) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True})
    url = live.http.base_url
    commands = ([HTTP_CLIENT, f"{url.host}:{url.port}", body], [GRPC_CLIENT, live.mesh.gateway_address])
    for command in commands:
        async with back_to_normal(live, 1):
            client = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", *command), stdout=asyncio.subprocess.PIPE
            )
            assert client.stdout is not None
            for _ in range(3):
                assert await client.stdout.readline() == b"received\n"
            client.kill()
            await client.wait()


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "unstreamed"])
async def test_who_only_stops_sending_gets_the_whole_answer(live: LiveMesh, stream: bool) -> None:
    async with back_to_normal(live, 0):
        request = await HttpRequest.send(live, prompt=PREFILL, max_tokens=100, stream=stream)
        request.writer.write_eof()
        answer = (await request.reader.read()).decode()
        request.writer.close()
        await request.writer.wait_closed()
    assert '"finish_reason":"length"' in answer
    assert answer.endswith("data: [DONE]\n\n\r\n0\r\n\r\n" if stream else "}")


async def test_a_client_object_that_is_dropped(live: LiveMesh) -> None:
    """Not closed, not read to its end, just forgotten with its whole connection."""
    async with back_to_normal(live, 1):
        client = GatewayClient(live.mesh.gateway_address)
        deltas = client.generate("x", GenerateOptions(max_tokens=4000, ignore_eos=True))
        await anext(deltas)
        await client.close()
        with contextlib.suppress(Exception):
            await deltas.aclose()
