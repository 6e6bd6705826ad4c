"""A whole gateway that leaves: over HTTP everything ends as it should."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx2
import pytest
import structlog

from services.gateway.app import run_gateway
from shared.config import GatewayConfig, HttpConfig, ListenConfig
from shared.lifecycle import Shutdown
from shared.messages import FinishReason
from tests.fakes.fake_scheduler import FakeScheduler, FakeSession

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BODY = {"prompt": "x", "max_tokens": 10, "stream": True}


@dataclass
class Gateway:
    client: httpx2.AsyncClient
    session: FakeSession
    shutdown: Shutdown
    task: asyncio.Task[None]


@contextlib.asynccontextmanager
async def gateway(grace_s: float) -> AsyncIterator[Gateway]:
    async with FakeScheduler() as scheduler:
        config = GatewayConfig(scheduler.address, ListenConfig(port=0), http=HttpConfig(listen=ListenConfig(port=0)))
        shutdown = Shutdown(grace_s)
        with structlog.testing.capture_logs() as logs:
            task = asyncio.create_task(run_gateway(config, shutdown))
            try:
                session = await scheduler.session()
                url = next(entry["address"] for entry in logs if entry["event"] == "http_listening")
                async with httpx2.AsyncClient(base_url=url, verify=False, timeout=10) as client:
                    async with asyncio.timeout(10):
                        while (await client.get("/ready")).status_code != 200:
                            pass
                    yield Gateway(client, session, shutdown, task)
            finally:
                shutdown.request("the test has ended")
                await asyncio.wait_for(task, 20)


async def test_what_runs_ends_well_and_what_comes_is_refused() -> None:
    async with gateway(grace_s=5) as running:
        async with running.client.stream("POST", "/v1/completions", json=BODY) as stream:
            submit = await running.session.submitted()
            running.session.tokens(submit.handle, *b"hel")
            chunks = stream.aiter_text()
            assert "hel" in await anext(chunks)
            running.shutdown.request("test")
            async with asyncio.timeout(5):
                while (ready := await running.client.get("/ready")).status_code == 200:
                    pass
            assert ready.headers["connection"] == "close"
            assert "shutting down" in ready.json()["reason"]
            assert (await running.client.get("/health")).status_code == 200
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
                body = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
                late = await running.client.post(path, json=body)
                assert late.status_code == 503
                assert late.headers["retry-after"]
                assert late.headers["connection"] == "close"
            running.session.end(submit.handle, FinishReason.STOP, *b"lo")
            rest = "".join([chunk async for chunk in chunks])
        assert '"finish_reason":"stop"' in rest
        assert rest.endswith("data: [DONE]\n\n")
        await asyncio.wait_for(running.task, 5)
        with pytest.raises(httpx2.ConnectError):
            await running.client.get("/health")


async def test_what_does_not_end_in_time_ends_in_an_error() -> None:
    async with gateway(grace_s=0.1) as running:
        unstreamed = asyncio.create_task(running.client.post("/v1/completions", json=BODY | {"stream": False}))
        await running.session.submitted()
        async with running.client.stream("POST", "/v1/completions", json=BODY) as stream:
            submit = await running.session.submitted()
            running.session.tokens(submit.handle, *b"hel")
            running.shutdown.request("test")
            text = "".join([chunk async for chunk in stream.aiter_text()])
        assert '"finish_reason":"' not in text
        assert "[DONE]" not in text
        error = json.loads(text.rstrip().rpartition("data: ")[2])["error"]
        assert error["code"] == "service_unavailable"
        assert (await unstreamed).status_code == 503
        await asyncio.wait_for(running.task, 5)


async def test_idle_connections_do_not_hold_the_gateway() -> None:
    async with gateway(grace_s=60) as running:
        url = running.client.base_url
        _, writer = await asyncio.open_connection(url.host, url.port)
        running.shutdown.request("test")
        await asyncio.wait_for(running.task, 3)
        writer.close()
