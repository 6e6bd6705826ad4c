from __future__ import annotations

import asyncio

import pytest

from services.gateway.jobs import GenerateJob
from services.gateway.readiness import Readiness
from services.gateway.scheduler_client import SchedulerClient
from services.gateway.served_model import load_model_text
from services.gateway.streams import News, StreamTable
from shared.clock import ManualClock
from shared.errors import OverloadedError
from shared.ids import RequestId
from shared.messages import Cancel, EngineInfo, SamplingParams, SessionEvents, Submit, token_ids

ENGINE = EngineInfo("synthetic:", 64, 300, 48, 16, 1, 1, "float32")


def make_job() -> GenerateJob:
    return GenerateJob(RequestId("r"), "synthetic:", token_ids([1]), 4, SamplingParams(), frozenset(), received_ns=0)


async def test_what_a_scheduler_does_not_read_is_bounded() -> None:
    streams = StreamTable(ManualClock())
    client = SchedulerClient("127.0.0.1:1", streams, Readiness(load_model_text), max_queued=2)
    try:
        (early,) = client.open([make_job()], News())  # waits for a session, in no queue
        queue: asyncio.Queue[Submit | Cancel] = asyncio.Queue()
        client._on_events(SessionEvents(engine_ready=ENGINE), queue)
        (late,) = client.open([make_job()], News())
        with pytest.raises(OverloadedError, match="does not keep up"):
            client.open([make_job()], News())
        client.close_stream(early)
        client.close_stream(early)
        assert list(streams.unfinished()) == [late]
        sent = [queue.get_nowait() for _ in range(queue.qsize())]
        assert [(type(message), message.handle) for message in sent] == [
            (Submit, early.handle),
            (Submit, late.handle),
            (Cancel, early.handle),
        ]
        client._on_events(SessionEvents(engine_ready=ENGINE), queue)
        assert queue.empty(), "a session hears of a request once"
    finally:
        await client.close()
