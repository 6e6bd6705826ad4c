"""Scenario 30 (h): a client whose host vanishes without a word is given up within the keepalive time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import TYPE_CHECKING

import pytest
import structlog

from services.gateway.app import run_gateway
from services.gateway.http import server as http_server
from shared import rpc
from shared.config import GatewayConfig, HttpConfig, ListenConfig
from shared.lifecycle import Shutdown
from tests.fakes.fake_scheduler import FakeScheduler, FakeSession
from tests.other_host import OtherHost, other_host

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from shared.ids import Handle

KEEPALIVE_S = 4
GONE_S = 5

HTTP_CLIENT = """
import http.client, sys
connection = http.client.HTTPConnection(sys.argv[1].partition("//")[2])
connection.request("POST", "/v1/completions", sys.argv[2], {"Content-Type": "application/json"})
response = connection.getresponse()
while response.read1():
    print("received", flush=True)
"""
GRPC_CLIENT = """
import asyncio, sys
from shared.client import GatewayClient
async def main():
    async with GatewayClient(sys.argv[1]) as client:
        async for delta in client.generate("x"):
            print("received", flush=True)
asyncio.run(main())
"""


@pytest.fixture
def host() -> Iterator[OtherHost]:
    with other_host() as made:
        yield made


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times of production are for networks, not for tests."""
    monkeypatch.setattr(http_server, "_TCP_KEEPALIVE_S", KEEPALIVE_S)
    monkeypatch.setattr(http_server, "_TCP_GONE_S", GONE_S)
    quick = {"grpc.keepalive_time_ms": 1000 * KEEPALIVE_S, "grpc.keepalive_timeout_ms": 1000 * KEEPALIVE_S}
    options = dict(rpc._SERVER_OPTIONS) | quick | {"grpc.http2.ping_timeout_ms": 1000 * KEEPALIVE_S}
    monkeypatch.setattr(rpc, "_SERVER_OPTIONS", list(options.items()))


@contextlib.asynccontextmanager
async def gateway(host: OtherHost) -> AsyncIterator[tuple[FakeSession, dict[str, str]]]:
    """A gateway that the other host reaches; its addresses by the API."""
    async with FakeScheduler() as scheduler:
        listen = ListenConfig(host.our_address, 0)
        config = GatewayConfig(scheduler.address, listen, http=HttpConfig(listen=listen))
        shutdown = Shutdown(0)
        with structlog.testing.capture_logs() as logs:
            task = asyncio.create_task(run_gateway(config, shutdown))
            try:
                session = await scheduler.session()
                async with asyncio.timeout(10):
                    while not any(entry["event"] == "service_ready" for entry in logs):
                        await asyncio.wait([task], timeout=0.01)
                url = next(entry["address"] for entry in logs if entry["event"] == "http_listening")
                yield session, {"http": url, "grpc": session.gateway_id}
            finally:
                shutdown.request("the test has ended")
                await asyncio.wait_for(task, 20)


@pytest.mark.usefixtures("_impatient")
async def test_clients_that_vanish_are_given_up(host: OtherHost) -> None:
    async with gateway(host) as (session, addresses), contextlib.AsyncExitStack() as clients:
        told: dict[Handle, str] = {}
        silent: dict[Handle, str] = {}
        for front, streamed in (("grpc", True), ("grpc", True), ("http", True), ("http", True), ("http", False)):
            body = json.dumps({"prompt": "x", "stream": streamed, "max_tokens": 40})
            script = {"grpc": GRPC_CLIENT, "http": HTTP_CLIENT}[front]
            command = [*host.prefix, sys.executable, "-c", script, addresses[front], body]
            client = await clients.enter_async_context(running(command))
            submit = await session.submitted()
            if streamed:
                session.tokens(submit.handle, *b"hello")
                assert client.stdout is not None
                assert await client.stdout.readline() == b"received\n"
            (told if streamed and front in silent.values() else silent)[submit.handle] = front
        host.vanish()
        for handle in told:
            session.tokens(handle, *b" world")  # which nobody acknowledges
        async with asyncio.timeout(3 * GONE_S):
            assert {await session.cancelled() for _ in range(5)} == {*told, *silent}


@contextlib.asynccontextmanager
async def running(command: list[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        await process.wait()
