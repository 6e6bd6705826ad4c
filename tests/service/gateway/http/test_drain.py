"""A whole gateway that leaves: over HTTP everything ends as it should."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import httpx2
import pytest

from shared.messages import FinishReason

if TYPE_CHECKING:
    from tests.service.gateway.http.conftest import StartGateway

BODY = {"prompt": "x", "max_tokens": 10, "stream": True}


async def test_what_runs_ends_well_and_what_comes_is_refused(start_gateway: StartGateway) -> None:
    async with start_gateway(grace_s=5) as running:
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


async def test_what_does_not_end_in_time_ends_in_an_error(start_gateway: StartGateway) -> None:
    async with start_gateway(grace_s=0.1) as running:
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


async def test_idle_connections_do_not_hold_the_gateway(start_gateway: StartGateway) -> None:
    async with start_gateway(grace_s=60) as running:
        url = running.client.base_url
        _, writer = await asyncio.open_connection(url.host, url.port)
        running.shutdown.request("test")
        await asyncio.wait_for(running.task, 3)
        writer.close()
