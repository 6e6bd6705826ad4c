"""The load client against a scripted gateway over gRPC."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest

from bench.load.client import find_model, open_client
from bench.load.endpoint import Endpoint, ServedModel
from bench.load.gateway_client import GatewayLoadClient
from bench.load.records import Outcome, Reception, RequestRecord
from bench.load.request_options import Api, PromptFormat, RequestOptions
from bench.load.runner import run_load
from bench.load.traces import TraceRequest
from bench.load.words import text_of
from shared.clock import ManualClock
from shared.errors import ConfigError, OverloadedError, UnauthenticatedError, UnavailableError
from shared.generation import ChatRequest, Delta, GenerateOptions, GenerateRequest
from shared.tls import TlsFiles
from tests.certificates import Authority
from tests.fakes.fake_gateway import ANSWER, INFO, FakeGateway, serving

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator
    from pathlib import Path

    from shared.client import GatewayClient

TRACE = [TraceRequest((5, 6, 7), 4), TraceRequest((8,), 4)]


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with serving(FakeGateway()) as gateway:
        yield gateway


async def load(gateway: FakeGateway, options: RequestOptions | None = None, **load: Any) -> list[RequestRecord]:
    endpoint = Endpoint.parse(f"grpc://{gateway.address}", api_key="a-key")
    async with open_client(endpoint, options or RequestOptions("tiny")) as client:
        return await asyncio.wait_for(run_load(client, TRACE, **load), 20)


async def test_every_request_is_answered(gateway: FakeGateway) -> None:
    records = await load(gateway, max_concurrency=1)
    assert [(r.outcome, r.num_prompt_tokens, r.num_output_tokens) for r in records] == [(Outcome.OK, 3, 4)] * 2
    assert [len(record.event_times_ns) for record in records] == [3, 3], "deltas that have tokens"
    first, second = gateway.asked
    for asked, prompt in ((first, [5, 6, 7]), (second, [8])):
        assert isinstance(asked, GenerateRequest)
        assert [list(ids) for ids in asked.prompts] == [prompt]
        assert asked.options == GenerateOptions(max_tokens=4, temperature=0.0, ignore_eos=True)
    assert all(metadata["authorization"] == "Bearer a-key" for metadata in gateway.metadata)


@pytest.mark.parametrize("api", Api)
async def test_prompts_as_text(gateway: FakeGateway, api: Api) -> None:
    options = RequestOptions("tiny", api, PromptFormat.TEXT, temperature=0.5, ignore_eos=False)
    records = await load(gateway, options)
    assert [record.error for record in records] == ["", ""]
    words = text_of((8,))
    asked = [request for request in gateway.asked if words in str(request)]
    for request in asked:
        assert request.options == GenerateOptions(max_tokens=4, temperature=0.5)
        if api is Api.CHAT:
            assert isinstance(request, ChatRequest)
            assert request.messages[0].role == "user"
    assert asked


async def test_failures_are_told(gateway: FakeGateway) -> None:
    gateway.deltas, gateway.failure = ANSWER[:2], OverloadedError("the queue is full")
    records = await load(gateway)
    assert [record.outcome for record in records] == [Outcome.FAILED] * 2
    assert all("the queue is full" in record.error for record in records)
    assert [len(record.event_times_ns) for record in records] == [1, 1]


async def test_a_stream_without_its_end_has_failed(gateway: FakeGateway) -> None:
    gateway.deltas = ANSWER[:2]
    records = await load(gateway)
    assert all("without its usage" in record.error for record in records)


async def test_a_request_that_takes_too_long_is_cancelled(gateway: FakeGateway) -> None:
    gateway.deltas, gateway.hangs = ANSWER[:2], True
    records = await load(gateway, timeout_s=0.2)
    assert [record.error for record in records] == ["it took longer than 0.2 s"] * 2
    for _ in records:
        await asyncio.to_thread(gateway.cancelled.get, timeout=10)


async def test_the_model_is_found(gateway: FakeGateway) -> None:
    endpoint = Endpoint.parse(f"grpc://{gateway.address}")
    assert await find_model(endpoint) == ServedModel("tiny", INFO.vocab_size, INFO.max_model_len)
    gateway.failure = UnauthenticatedError("no API key")
    with pytest.raises(UnauthenticatedError, match="no API key"):
        await find_model(endpoint)


async def test_tls_where_there_is_none(gateway: FakeGateway) -> None:
    with pytest.raises(UnavailableError):
        await find_model(Endpoint.parse(f"grpcs://{gateway.address}"))


async def test_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.pair()
    files = TlsFiles(pair.certificate, pair.private_key, authority.file)
    loaded = files.load()
    assert loaded.private_key is not None
    assert loaded.certificate is not None
    own = [(loaded.private_key, loaded.certificate)]
    credentials = grpc.ssl_server_credentials(own, loaded.authorities, require_client_auth=True)
    with serving(FakeGateway(), credentials) as gateway:
        endpoint = Endpoint.parse(f"grpcs://{gateway.address}", tls=files)
        assert (await find_model(endpoint)).name == "tiny"
        async with open_client(endpoint, RequestOptions("tiny")) as client:
            assert [record.error for record in await run_load(client, TRACE)] == ["", ""]


async def test_there_is_no_body_for_more_fields() -> None:
    with pytest.raises(ConfigError, match="gRPC has no body"):
        async with open_client(Endpoint.parse("grpc://h"), RequestOptions("m", extra_body={"a": 1})):
            pass


async def test_times_are_those_of_arrival() -> None:
    clock = ManualClock()
    at_ms = (10, 30, 50, 90)

    class Client:
        """Gives deltas at set times."""

        async def generate(self, prompt: Any, options: GenerateOptions) -> AsyncGenerator[Delta, None]:
            for time_ms, delta in zip(at_ms, ANSWER, strict=True):
                clock.time_ns = time_ms * 10**6
                yield delta

    client = GatewayLoadClient(cast("GatewayClient", Client()), RequestOptions("tiny"), clock)
    reception = Reception()
    await client.send(TRACE[0], reception)
    assert [time_ns / 1e6 for time_ns in reception.event_times_ns] == [30, 50, 90]
    assert reception.ended_ns == 90_000_000
