"""The load client against a scripted server of OpenAI's API that fails, or whose connections do."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import TYPE_CHECKING

import pytest

from bench.load.client import find_model, open_client
from bench.load.endpoint import Endpoint
from bench.load.records import Outcome
from bench.load.request_options import RequestOptions
from bench.load.runner import run_load
from shared.errors import UnavailableError
from tests.fakes.fake_openai import Exchange, FakeOpenAi, finished, stream, text
from tests.scripted_load import TRACE, load

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def test_a_connection_that_the_server_has_closed_is_replaced(server: FakeOpenAi) -> None:
    async def script(exchange: Exchange) -> None:
        await stream(exchange)
        if exchange.connection == 0:
            exchange.reader.feed_eof()  # the next request finds nobody
            exchange.cut()

    server.script = script
    records = await load(server, *[TRACE[0]] * 3, max_concurrency=1)
    assert [record.outcome for record in records] == [Outcome.OK] * 3
    assert server.num_connections == 2


async def test_a_kept_connection_that_breaks_before_an_answer_is_replaced(server: FakeOpenAi) -> None:
    """The server closes it just when the next request is on its way."""

    async def script(exchange: Exchange) -> None:
        if exchange.connection == 0 and len(server.asked) == 2:
            exchange.cut()
        else:
            await stream(exchange)

    server.script = script
    records = await load(server, *[TRACE[0]] * 2, max_concurrency=1)
    assert [record.error for record in records] == ["", ""]
    assert len(server.asked) == 3


async def framed(exchange: Exchange, head: bytes, *, closes: bool) -> None:
    events = b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\ndata: {"usage":{"prompt_tokens":3,'
    events += b'"completion_tokens":1}}\n\n'
    await exchange.raw(head.replace(b"LENGTH", str(len(events)).encode()) + events)
    if closes:
        exchange.writer.close()


@pytest.mark.parametrize(
    ("head", "closes"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: LENGTH\r\n\r\n", False),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: LENGTH\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: LENGTH\r\nConnection: close\r\n\r\n", True),
        (b"HTTP/1.0 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
    ],
    ids=["length", "after 100", "length and close", "HTTP/1.0", "until the end"],
)
async def test_answers_end_in_any_of_the_ways_of_http(server: FakeOpenAi, head: bytes, closes: bool) -> None:
    server.script = partial(framed, head=head, closes=closes)
    records = await load(server, max_concurrency=1)
    assert [record.error for record in records] == ["", ""]
    assert [record.num_output_tokens for record in records] == [1, 1]


def answers(status: int, body: bytes) -> Callable[[Exchange], Awaitable[None]]:
    return lambda exchange: exchange.answer(status, body)


async def breaks_off(exchange: Exchange) -> None:
    await exchange.events(text("a"))
    exchange.cut()


async def ends_early(exchange: Exchange) -> None:
    await exchange.events(text("a"))
    await exchange.end()


async def fails_on_the_way(exchange: Exchange) -> None:
    await exchange.events(text("a"), {"error": {"message": "the engine was lost", "code": "service_unavailable"}})
    await exchange.raw(b"0\r\n\r\n")


async def counts_nothing(exchange: Exchange) -> None:
    await exchange.events(text("a"), finished("b"))
    await exchange.end()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (answers(429, b'{"error": {"message": "the queue is full", "code": 429}}'), "HTTP 429: the queue is full"),
        (answers(400, b'{"object": "error", "message": "too long"}'), "HTTP 400: too long"),
        (answers(404, b'{"detail": "Not Found"}'), "HTTP 404: Not Found"),
        (answers(401, b'{"error": "no key"}'), "HTTP 401: no key"),
        (answers(500, b"<html>oops" + b"x" * 1000), "HTTP 500: <html>oopsx"),
        (answers(503, b""), "HTTP 503: "),
        (answers(307, b""), "HTTP 307: "),
        (answers(200, b'{"choices": []}'), "without a finish reason: it is cut off, or no event stream"),
        (answers(200, b"data: nonsense\n\n"), "an event that is not of OpenAI's API: nonsense"),
        (answers(200, b"data: [1]\n\n"), "an event that is not of OpenAI's API"),
        (answers(200, b'data: {"choices": [7]}\n\n'), "an event that is not of OpenAI's API"),
        (answers(200, b'data: {"usage": {"tokens": 7}}\n\n'), "an event that is not of OpenAI's API"),
        (answers(500, b"x" * (2 << 20)), "answered with more than"),
        (lambda exchange: exchange.raw(b"SSH-2.0-OpenSSH\r\n"), "does not speak HTTP"),
        (breaks_off, "closed the connection before its answer was whole"),
        (ends_early, "without a finish reason"),
        (fails_on_the_way, "the stream ended with an error: the engine was lost"),
        (counts_nothing, "no usage: its tokens cannot be counted"),
    ],
)
async def test_what_fails_is_told_and_the_rest_goes_on(
    server: FakeOpenAi, script: Callable[[Exchange], Awaitable[None]], said: str
) -> None:
    server.script = lambda exchange: script(exchange) if exchange.body["max_tokens"] == 3 else stream(exchange)
    failed, fine = await load(server, max_concurrency=1)
    assert (failed.outcome, fine.outcome) == (Outcome.FAILED, Outcome.OK)
    assert said in failed.error
    assert len(failed.error) < 500


async def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with open_client(Endpoint.parse(url), RequestOptions("tiny")) as client:
            (record,) = await run_load(client, TRACE[:1])
        assert record.outcome is Outcome.FAILED
        assert f"nothing answers at {url}" in record.error
        with pytest.raises(UnavailableError, match="nothing answers at"):
            await find_model(Endpoint.parse(url))


async def test_a_request_that_takes_too_long_is_given_up(server: FakeOpenAi) -> None:
    left = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.events(text("a"))
        await exchange.left()
        left.set()

    server.script = script
    (record,) = await load(server, TRACE[0], timeout_s=0.05)
    assert (record.outcome, record.error) == (Outcome.FAILED, "it took longer than 0.05 s")
    assert len(record.event_times_ns) <= 1
    await asyncio.wait_for(left.wait(), 10)


@pytest.mark.parametrize("arrivals_s", [None, [0.0, 0.0, 0.0, 1e6]], ids=["closed", "open"])
async def test_a_run_that_is_stopped_keeps_what_has_come(server: FakeOpenAi, arrivals_s: list[float] | None) -> None:
    stop, left = asyncio.Event(), asyncio.Event()

    async def script(exchange: Exchange) -> None:
        if len(server.asked) == 1:
            await stream(exchange)
            return
        await exchange.events(text("a"))
        stop.set()
        await exchange.left()
        left.set()

    server.script = script
    records = await load(server, *[TRACE[0]] * 4, max_concurrency=1, stop=stop, arrivals_s=arrivals_s)
    cancelled = 1 if arrivals_s is None else 2  # the one that had arrived and was held back, too
    assert [record.outcome for record in records] == [Outcome.OK] + [Outcome.CANCELLED] * cancelled
    assert len(server.asked) == 2
    await asyncio.wait_for(left.wait(), 10)


async def test_cancelling_a_run_cancels_its_requests(server: FakeOpenAi) -> None:
    sent, left = asyncio.Event(), asyncio.Event()

    async def script(exchange: Exchange) -> None:
        sent.set()
        await exchange.left()
        left.set()

    server.script = script
    async with open_client(Endpoint.parse(server.url), RequestOptions("tiny")) as client:
        running = asyncio.create_task(run_load(client, TRACE[:1]))
        await asyncio.wait_for(sent.wait(), 10)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.wait_for(left.wait(), 10)
