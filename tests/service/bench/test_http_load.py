"""The load client against a scripted server of OpenAI's API: what it sends, when it takes what for come, what fails."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

import pytest

from bench.load.client import find_model, open_client
from bench.load.endpoint import Endpoint, ServedModel
from bench.load.http_client import HttpClient
from bench.load.openai_client import OpenAiClient
from bench.load.records import Outcome, RequestRecord
from bench.load.request_options import Api, PromptFormat, RequestOptions
from bench.load.runner import run_load
from bench.load.words import text_of
from shared.errors import (
    ConfigError,
    ModelNotFoundError,
    OrcaError,
    ProtocolError,
    UnauthenticatedError,
    UnavailableError,
)
from shared.tls import TlsFiles
from tests.certificates import Authority
from tests.fakes.fake_openai import Exchange, FakeOpenAi, ReadClock, finished, stream, text, usage
from tests.scripted_load import TRACE, load

if TYPE_CHECKING:
    from pathlib import Path


async def test_every_request_is_answered(server: FakeOpenAi) -> None:
    ended: list[RequestRecord] = []
    records = await load(server, on_end=ended.append)
    assert [record.outcome for record in records] == [Outcome.OK] * 2
    assert [record.index for record in records] == [0, 1]
    assert [(record.num_prompt_tokens, record.num_output_tokens) for record in records] == [(3, 3), (1, 2)]
    assert [len(record.event_times_ns) for record in records] == [3, 2]
    assert sorted(ended, key=lambda record: record.index) == records
    for record in records:
        assert record.started_ns == record.sent_ns <= record.event_times_ns[0] <= record.ended_ns


async def test_what_is_asked(server: FakeOpenAi) -> None:
    endpoint = Endpoint.parse(server.url + "/prefix/v1", api_key="a-key")
    options = RequestOptions("tiny", temperature=0.5, extra_body={"top_k": 3})
    async with open_client(endpoint, options) as client:
        await run_load(client, TRACE[:1])
    (asked,) = server.asked
    assert (asked.method, asked.path) == ("POST", "/prefix/v1/completions")
    assert asked.headers["authorization"] == "Bearer a-key"
    assert asked.headers["host"] == endpoint.address
    assert asked.body == {
        "model": "tiny",
        "prompt": [101, 102, 103],
        "max_tokens": 3,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "top_k": 3,
    }


@pytest.mark.parametrize("api", Api)
async def test_prompts_as_text(server: FakeOpenAi, api: Api) -> None:
    options = RequestOptions("tiny", api, PromptFormat.TEXT, ignore_eos=False)

    async def converse(exchange: Exchange) -> None:
        role: dict[str, Any] = {"choices": [{"delta": {"role": "assistant"}}]}
        word: dict[str, Any] = {"choices": [{"delta": {"content": "x"}}]}
        end: dict[str, Any] = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        await exchange.events(role, word, word, end, usage(9, 2))
        await exchange.end()

    if api is Api.CHAT:
        server.script = converse
    async with open_client(Endpoint.parse(server.url), options) as client:
        (record,) = await run_load(client, TRACE[1:])
    (asked,) = server.asked
    words = text_of(TRACE[1].prompt)
    if api is Api.CHAT:
        assert asked.path == "/v1/chat/completions"
        assert asked.body["messages"] == [{"role": "user", "content": words}]
    else:
        assert asked.body["prompt"] == words
    assert "ignore_eos" not in asked.body
    assert (record.outcome, len(record.event_times_ns), record.error) == (Outcome.OK, 2, "")


class Timed:
    """Sends events at set times of the clock, each once the one before has been read."""

    def __init__(self, clock: ReadClock) -> None:
        self._clock = clock

    async def events(self, exchange: Exchange, at_ms: float, *events: dict[str, Any]) -> None:
        self._clock.set(at_ms)
        await exchange.events(*events)
        await self._clock.read()


async def timed_load(server: FakeOpenAi, clock: ReadClock, api: Api, **options: Any) -> list[RequestRecord]:
    prompt_format = PromptFormat.TEXT if api is Api.CHAT else PromptFormat.TOKEN_IDS
    async with HttpClient(Endpoint.parse(server.url), clock) as http:
        client = OpenAiClient(http, RequestOptions("tiny", api, prompt_format))
        return await asyncio.wait_for(run_load(client, TRACE, clock=clock, **options), 20)


async def test_times_are_those_of_arrival(server: FakeOpenAi) -> None:
    clock = ReadClock()
    timed = Timed(clock)

    async def script(exchange: Exchange) -> None:
        begin_ms = clock.time_ms
        await timed.events(exchange, begin_ms + 30, text("a"))
        await timed.events(exchange, begin_ms + 45, text(""))  # half a character
        await timed.events(exchange, begin_ms + 50, text("b"), text("c"))
        await timed.events(exchange, begin_ms + 90, finished())
        await timed.events(exchange, begin_ms + 95, usage(3, 5))
        await exchange.end()

    server.script = script
    first, second = await timed_load(server, clock, Api.COMPLETIONS, max_concurrency=1)
    for record, start_ms in ((first, 0), (second, 95)):
        assert record.started_ns == record.sent_ns == start_ms * 10**6, "a closed loop counts from sending"
        times_ms = [time_ns / 1e6 - start_ms for time_ns in record.event_times_ns]
        assert times_ms == [30, 50, 50]
        assert (record.ttft_ms, record.e2e_ms, record.tpot_ms) == (30, 90, 15)


async def test_an_open_loop_counts_from_arrival(server: FakeOpenAi) -> None:
    """The second one has to wait until the first has ended."""
    clock = ReadClock()
    timed = Timed(clock)

    async def script(exchange: Exchange) -> None:
        await timed.events(exchange, clock.time_ms + 40, finished("a"), usage(3, 1))
        await exchange.end()

    server.script = script
    first, second = await timed_load(server, clock, Api.COMPLETIONS, max_concurrency=1, arrivals_s=[0.0, 0.0])
    assert (first.started_ns, first.sent_ns, first.ttft_ms) == (0, 0, 40)
    assert (second.started_ns, second.sent_ns, second.ttft_ms) == (0, 40_000_000, 80)


async def test_a_role_is_no_output(server: FakeOpenAi) -> None:
    clock = ReadClock()
    timed = Timed(clock)

    async def script(exchange: Exchange) -> None:
        begin_ms = clock.time_ms
        for at_ms, delta, finish in ((5, {"role": "assistant", "content": ""}, None), (20, {"content": "a"}, None)):
            await timed.events(exchange, begin_ms + at_ms, {"choices": [{"delta": delta, "finish_reason": finish}]})
        await timed.events(
            exchange, begin_ms + 30, {"choices": [{"delta": {}, "finish_reason": "length"}]}, usage(9, 3)
        )
        await exchange.end()

    server.script = script
    for record in await timed_load(server, clock, Api.CHAT, max_concurrency=1):
        assert (record.ttft_ms, record.e2e_ms, record.num_prompt_tokens) == (20, 30, 9)


async def test_arrivals_are_kept(server: FakeOpenAi) -> None:
    arrivals_s = [0.0, 0.03, 0.06]
    records = await load(server, *[TRACE[0]] * 3, arrivals_s=arrivals_s)
    begin_ns = records[0].started_ns
    started_s = [(record.started_ns - begin_ns) / 1e9 for record in records]
    assert started_s == pytest.approx(arrivals_s, abs=2e-3), "by the trace, however late the client was"
    assert all(record.sent_ns >= record.started_ns for record in records)


async def test_so_many_are_in_flight_and_no_more(server: FakeOpenAi) -> None:
    in_flight, peak = 0, 0
    full = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        nonlocal in_flight, peak
        in_flight += 1
        peak = max(peak, in_flight)
        if in_flight == 3:
            full.set()
        await asyncio.wait_for(full.wait(), 10)
        in_flight -= 1
        await stream(exchange)

    server.script = script
    records = await load(server, *[TRACE[0]] * 9, max_concurrency=3)
    assert [record.outcome for record in records] == [Outcome.OK] * 9
    assert peak == 3
    assert server.num_connections == 3, "connections are kept"


async def test_without_a_limit_everything_is_sent_at_once(server: FakeOpenAi) -> None:
    all_there = asyncio.Barrier(20)

    async def script(exchange: Exchange) -> None:
        await asyncio.wait_for(all_there.wait(), 10)
        await stream(exchange)

    server.script = script
    assert len(await load(server, *[TRACE[0]] * 20)) == 20


async def test_models(server: FakeOpenAi) -> None:
    endpoint = Endpoint.parse(server.url)
    assert await find_model(endpoint) == await find_model(endpoint, "tiny") == ServedModel("tiny", 300, 1000)
    with pytest.raises(ModelNotFoundError, match="serves no model 'other'; it has: tiny"):
        await find_model(endpoint, "other")
    server.models = b'{"data": [{"id": "a"}, {"id": "b", "max_model_len": null, "vocab_size": "x"}]}'
    assert await find_model(endpoint) == ServedModel("a")
    assert await find_model(endpoint, "b") == ServedModel("b")


@pytest.mark.parametrize(
    ("status", "body", "error", "said"),
    [
        (404, b"", ConfigError, "does not tell which models it serves: name one with --model"),
        (200, b'{"data": []}', ConfigError, "name one with --model"),
        (200, b"<html>", ProtocolError, "is this an endpoint of OpenAI's API"),
        (200, b'{"data": 5}', ProtocolError, "is this an endpoint of OpenAI's API"),
        (401, b'{"error": {"message": "no key"}}', UnauthenticatedError, "HTTP 401: no key"),
        (502, b"", OrcaError, "HTTP 502"),
    ],
)
async def test_lists_of_models_that_are_none(
    server: FakeOpenAi, status: int, body: bytes, error: type[OrcaError], said: str
) -> None:
    server.models_status, server.models = status, body
    with pytest.raises(error, match=said):
        await find_model(Endpoint.parse(server.url))


async def test_a_model_may_be_named_where_there_is_no_list(server: FakeOpenAi) -> None:
    server.models_status = 404
    assert await find_model(Endpoint.parse(server.url), "tiny") == ServedModel("tiny")


async def test_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.pair()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.file)
    context.load_cert_chain(pair.certificate, pair.private_key)
    context.verify_mode = ssl.CERT_REQUIRED
    trusting = TlsFiles(pair.certificate, pair.private_key, authority.file)
    async with FakeOpenAi().serving(context) as server:
        endpoint = Endpoint.parse(server.url, tls=trusting)
        assert (await find_model(endpoint)).name == "tiny"
        async with open_client(endpoint, RequestOptions("tiny")) as client:
            assert [record.error for record in await run_load(client, TRACE)] == ["", ""]
        with pytest.raises(UnavailableError, match=r"cannot be trusted: .*; --tls-ca names its authority"):
            await find_model(Endpoint.parse(server.url))
        with pytest.raises(UnavailableError, match=r"does not speak HTTP|closed the connection"):
            await find_model(Endpoint.parse(server.url.replace("https", "http")))


async def test_who_does_not_speak_tls() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as plain:
        port = plain.sockets[0].getsockname()[1]
        with pytest.raises(UnavailableError, match="does not speak TLS"):
            await find_model(Endpoint.parse(f"https://127.0.0.1:{port}"))
