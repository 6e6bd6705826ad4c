"""A run of the load client against a scripted server of OpenAI's API."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from bench.load.client import open_client
from bench.load.endpoint import Endpoint
from bench.load.request_options import RequestOptions
from bench.load.runner import run_load
from bench.load.traces import TraceRequest

if TYPE_CHECKING:
    from bench.load.records import RequestRecord
    from tests.fakes.fake_openai import FakeOpenAi

__all__ = ["TRACE", "load"]

TRACE = [TraceRequest((101, 102, 103), 3), TraceRequest((104,), 2)]


async def load(server: FakeOpenAi, *trace: TraceRequest, **options: Any) -> list[RequestRecord]:
    async with open_client(Endpoint.parse(server.url), RequestOptions("tiny")) as client:
        return await asyncio.wait_for(run_load(client, trace or TRACE, **options), 20)
