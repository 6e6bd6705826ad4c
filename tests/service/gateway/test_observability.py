"""What a gateway tells of its requests: metrics that balance, spans, and where they are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from structlog.testing import capture_logs

from shared.client import GenerateOptions
from shared.config import HttpConfig, ListenConfig, ObservabilityConfig
from shared.errors import DeadlineExceededError, InvalidRequestError, OrcaError, OverloadedError
from shared.messages import FinishReason
from shared.pb import gateway_pb2, gateway_pb2_grpc
from shared.rpc import connect
from shared.status import StatusCode
from shared.tracing import TraceContext
from tests.exposition import OPENMETRICS, Exposition, faults, metrics_url, scrape
from tests.fakes.otlp_collector import OtlpCollector

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.service.gateway.conftest import RunningGateway, StartGateway

EOS = 256
METRICS = ObservabilityConfig(ListenConfig(port=0))
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ENDINGS = ["stop", "length", "cancelled", "error", "deadline", "invalid", "overloaded"]
COUNTED_AS = {
    "stop": ("stop", "OK"),
    "length": ("length", "OK"),
    "cancelled": ("cancelled", "CANCELLED"),
    "error": ("error", "INTERNAL"),
    "deadline": ("deadline", "DEADLINE_EXCEEDED"),
    "invalid": ("refused", "INVALID_ARGUMENT"),
    "overloaded": ("refused", "RESOURCE_EXHAUSTED"),
}


async def drain(deltas: AsyncIterator[object]) -> None:
    async for _ in deltas:
        pass


async def end_as(gateway: RunningGateway, ending: str) -> None:
    """Send a request and have it end so."""
    client, session = gateway.client, gateway.session
    if ending == "invalid":
        with pytest.raises(InvalidRequestError):
            await drain(client.generate("a", GenerateOptions(temperature=-1.0)))
        return
    if ending == "deadline":
        with pytest.raises(DeadlineExceededError):
            await drain(client.generate("a", GenerateOptions(max_tokens=5, timeout_s=0.01)))
        return
    deltas = client.generate("a", GenerateOptions(max_tokens=4))
    await anext(deltas)
    submit = await session.submitted()
    while submit.max_tokens != 4:  # of one that missed its deadline
        submit = await session.submitted()
    session.tokens(submit.handle, *b"x")
    await anext(deltas)
    match ending:
        case "stop":
            session.end(submit.handle, FinishReason.STOP, EOS, decode_ns=10**7)
            await drain(deltas)
        case "length":
            session.end(submit.handle, FinishReason.LENGTH, *b"yz")
            await drain(deltas)
        case "cancelled":
            await deltas.aclose()
            while await session.cancelled() != submit.handle:
                pass
        case "error":
            session.end(submit.handle, FinishReason.ERROR, error_code=StatusCode.INTERNAL, error_message="broken")
            with pytest.raises(OrcaError, match="broken"):
                await drain(deltas)
        case "overloaded":
            session.end(submit.handle, FinishReason.ERROR, error_code=StatusCode.RESOURCE_EXHAUSTED, error_message="x")
            with pytest.raises(OverloadedError):
                await drain(deltas)


def check_balance(found: Exposition) -> None:
    assert found.total("orca_requests_received_total") == (
        found.total("orca_requests_ended_total") + found.value("orca_requests_in_flight")
    )


async def test_every_ending_is_counted_once(start_gateway: StartGateway) -> None:
    endings = 4 * ENDINGS
    random.Random(7).shuffle(endings)
    with capture_logs() as logs:
        async with start_gateway(observability=METRICS) as gateway:
            await gateway.health(serving=True)
            url = metrics_url(logs)
            for ending in endings:
                await end_as(gateway, ending)
                check_balance(await scrape(url))
            open_deltas = gateway.client.generate("a", GenerateOptions(max_tokens=4))
            await anext(open_deltas)
            found = await scrape(url, OPENMETRICS)
            check_balance(found)
            assert not faults(found)
            assert found.value("orca_requests_in_flight") == 1
            assert found.value("orca_requests_in_service") == 1
            assert found.value("orca_requests_received_total", method="Generate") == len(endings) + 1
            for reason, code in COUNTED_AS.values():
                assert found.value("orca_requests_ended_total", reason=reason, code=code) == 4
            # One token after the first in each that stopped, two in each that reached its length.
            assert found.value("orca_inter_token_latency_seconds_count") == 4 * (1 + 2)
            assert found.value("orca_time_to_first_token_seconds_count") == 4 * 5
            assert found.value("orca_time_per_output_token_seconds_sum") == pytest.approx(4 * 0.01)
            assert found.value("orca_e2e_request_latency_seconds_count") == len(endings)
            await open_deltas.aclose()


async def test_requests_that_wait_are_in_flight(start_gateway: StartGateway) -> None:
    with capture_logs() as logs:
        async with start_gateway(max_requests=1, max_queued=4, observability=METRICS) as gateway:
            await gateway.health(serving=True)
            first = gateway.client.generate("a", GenerateOptions(max_tokens=4))
            await anext(first)
            waiting = [asyncio.create_task(drain(gateway.client.generate("a"))) for _ in range(3)]
            found = await scrape(metrics_url(logs))
            while found.value("orca_requests_in_flight") < 4:
                found = await scrape(metrics_url(logs))
                check_balance(found)
            assert found.value("orca_requests_queued") == 3
            assert found.value("orca_requests_in_service") == 1
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await first.aclose()


async def test_the_http_front_serves_them_to_who_has_a_key(start_gateway: StartGateway, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("prometheus a-secret-of-some-length\n")
    keys.chmod(0o600)
    http = HttpConfig(listen=ListenConfig(port=0))

    def get(url: str, key: str | None, path: str = "/metrics") -> tuple[int, str, str]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(f"{url}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return response.status, response.headers["Content-Type"], response.read().decode()
        except urllib.error.HTTPError as refusal:
            return refusal.code, "", ""

    with capture_logs() as logs:
        async with start_gateway(http=http, api_keys=str(keys)):
            (address,) = (event["address"] for event in logs if event["event"] == "http_listening")
            assert (await asyncio.to_thread(get, address, None))[0] == 401
            assert (await asyncio.to_thread(get, address, "a-secret-of-some-length", "/not/there"))[0] == 404
            assert (await asyncio.to_thread(get, address, None, "/health"))[0] == 200
            status, content_type, body = await asyncio.to_thread(get, address, "a-secret-of-some-length")
    assert status == 200
    found = Exposition.of(body, content_type)
    assert found.value("orca_requests_in_flight") == 0
    assert found.value("orca_http_requests_total", route="none", status="401") == 1, "refused before it was looked at"
    assert found.value("orca_http_requests_total", route="none", status="404") == 1
    assert found.value("orca_http_requests_total", route="/health", status="200") == 1
    assert not faults(found)


@contextlib.asynccontextmanager
async def traced(start_gateway: StartGateway, collector: OtlpCollector, **fields: Any) -> AsyncIterator[RunningGateway]:
    observability = ObservabilityConfig(otlp_endpoint=collector.endpoint)
    async with start_gateway(observability=observability, **fields) as gateway:
        await gateway.health(serving=True)
        yield gateway


async def test_a_request_is_a_span_below_the_clients(start_gateway: StartGateway) -> None:
    with OtlpCollector() as collector, capture_logs() as logs:
        async with traced(start_gateway, collector) as gateway, connect(gateway.address) as channel:
            stub = gateway_pb2_grpc.GatewayStub(channel)
            request = gateway_pb2.GenerateRequest(
                request_id="mine",
                prompts=[gateway_pb2.Prompt(text="a")],
                options=gateway_pb2.GenerationOptions(max_tokens=4),
            )
            call = stub.Generate(request, metadata=[("traceparent", CLIENT)])
            submit = await gateway.session.submitted()
            gateway.session.tokens(submit.handle, *b"x")
            gateway.session.end(submit.handle, FinishReason.STOP, EOS)
            async for _ in call:
                pass
            assert await call.code() is grpc.StatusCode.OK
            with pytest.raises(InvalidRequestError):
                await drain(gateway.client.generate("a", GenerateOptions(temperature=-1.0)))
    told, client = TraceContext.parse(submit.traceparent), TraceContext.parse(CLIENT)
    assert told is not None
    assert client is not None
    assert told.trace_id == client.trace_id
    served, refused = collector.spans
    assert (served.service, served.name) == ("orca-gateway", "text_completion")
    assert (int(served.trace_id, 16), int(served.parent_id, 16)) == (client.trace_id, client.span_id)
    assert int(served.span_id, 16) == told.span_id
    assert served.attributes["orca.request_id"] == "mine"
    assert served.attributes["gen_ai.usage.output_tokens"] == 2
    assert served.events == ("first_token",)
    assert served.error == ""
    assert (refused.error, refused.attributes["error.type"]) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
    lines = [event for event in logs if event["event"] == "request_ended"]
    assert [line["trace_id"] for line in lines] == [served.trace_id, refused.trace_id]
    assert refused.parent_id == ""
    assert refused.trace_id != served.trace_id


async def test_http_requests_are_traced_alike(start_gateway: StartGateway) -> None:
    def post(url: str) -> None:
        body = json.dumps({"model": "synthetic:", "prompt": "a", "max_tokens": 4}).encode()
        headers = {"Content-Type": "application/json", "traceparent": CLIENT}
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers), timeout=10):
            pass

    with OtlpCollector() as collector, capture_logs() as logs:
        async with traced(start_gateway, collector, http=HttpConfig(listen=ListenConfig(port=0))) as gateway:
            (address,) = (event["address"] for event in logs if event["event"] == "http_listening")
            posting = asyncio.create_task(asyncio.to_thread(post, address))
            submit = await gateway.session.submitted()
            gateway.session.end(submit.handle, FinishReason.STOP, EOS)
            await posting
    (span,) = collector.spans
    client = TraceContext.parse(CLIENT)
    assert client is not None
    assert (int(span.trace_id, 16), int(span.parent_id, 16)) == (client.trace_id, client.span_id)
    assert f"-{span.span_id}-" in submit.traceparent


async def test_without_a_tracer_nothing_is_told_to_the_scheduler(gateway: RunningGateway) -> None:
    async with connect(gateway.address) as channel:
        request = gateway_pb2.GenerateRequest(prompts=[gateway_pb2.Prompt(text="a")])
        call = gateway_pb2_grpc.GatewayStub(channel).Generate(request, metadata=[("traceparent", CLIENT)])
        submit = await gateway.session.submitted()
        assert submit.traceparent == ""
        call.cancel()
        await gateway.session.cancelled()
