"""A server and a client of ours over a real socket: errors, health, reflection, request ids, ports."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import structlog
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shared.errors import ConfigError, InvalidRequestError
from shared.log import get_logger
from shared.pb import gateway_pb2, gateway_pb2_grpc
from shared.rpc import MAX_MESSAGE_BYTES, REQUEST_ID_KEY, RpcServer, connect, request_id_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NAME = "orca.v1.Gateway"


class Servicer:
    """Does what the test asks for in the request's text; the other methods are those that answer UNIMPLEMENTED."""

    def __getattr__(self, method: str) -> Any:
        return {"Tokenize": self._tokenize, "Generate": self._generate}.get(method)

    async def _tokenize(self, request: Any, context: Any) -> gateway_pb2.TokenizeResponse:
        get_logger().info("asked")
        if request.text == "refuse":
            raise InvalidRequestError("text: refused, ask for something else")
        if request.text == "break":
            raise KeyError("a secret")
        if request.text == "who":
            bound = structlog.contextvars.get_contextvars().get("request_id", "")
            assert bound == (request_id_of(context) or "")
            return gateway_pb2.TokenizeResponse(token_ids=map(ord, bound))
        return gateway_pb2.TokenizeResponse(token_ids=[len(request.text)])

    async def _generate(self, request: Any, context: Any) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        yield gateway_pb2.GenerateResponse(text_delta="first")
        raise InvalidRequestError("text: refused in mid-stream")


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[RpcServer, aio.Channel]]:
    server = RpcServer()
    server.add(gateway_pb2_grpc.add_GatewayServicer_to_server, Servicer(), NAME)
    port = await server.start("127.0.0.1", 0)
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            yield server, channel
    finally:
        await server.stop(0)


async def tokenize(channel: aio.Channel, text: str, **options: Any) -> gateway_pb2.TokenizeResponse:
    response: gateway_pb2.TokenizeResponse = await gateway_pb2_grpc.GatewayStub(channel).Tokenize(
        gateway_pb2.TokenizeRequest(text=text), **options
    )
    return response


async def test_typed_errors_become_their_status() -> None:
    async with serving() as (_, channel):
        with pytest.raises(aio.AioRpcError) as failure:
            await tokenize(channel, "refuse")
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.value.details() == "text: refused, ask for something else"


async def test_a_stream_may_fail_after_it_has_begun() -> None:
    async with serving() as (_, channel):
        call = gateway_pb2_grpc.GatewayStub(channel).Generate(gateway_pb2.GenerateRequest())
        first: Any = await call.read()
        assert first.text_delta == "first"
        with pytest.raises(aio.AioRpcError, match="refused in mid-stream"):
            await call.read()


@pytest.mark.parametrize("method", ["Tokenize", "Generate"])
@pytest.mark.parametrize(
    ("sent", "message"), [([], "has ended without a request"), ([b"\x0a\xff"], "the request cannot be decoded")]
)
async def test_a_call_without_a_request_that_can_be_read_is_refused(
    method: str, sent: list[bytes], message: str
) -> None:
    async with serving() as (_, channel):
        call: Any = channel.stream_stream(f"/{NAME}/{method}")()
        for data in sent:
            await call.write(data)
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert message in str(await call.details())


async def test_what_is_not_ours_stays_hidden_and_is_logged() -> None:
    async with serving() as (_, channel):
        with structlog.testing.capture_logs() as logs, pytest.raises(aio.AioRpcError) as failure:
            await tokenize(channel, "break")
        assert failure.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in str(failure.value.details())
        (event,) = (log for log in logs if log["event"] == "rpc_failed")
        assert event["method"] == "/orca.v1.Gateway/Tokenize"
        assert isinstance(event["exc_info"], KeyError)


async def test_request_ids_travel_in_the_metadata_and_reach_the_logs() -> None:
    async with serving() as (_, channel):
        response = await tokenize(channel, "who", metadata=((REQUEST_ID_KEY, "r-7"),))
        assert bytes(response.token_ids) == b"r-7"
        assert not (await tokenize(channel, "who")).token_ids


async def test_large_messages_pass_and_larger_ones_do_not() -> None:
    async with serving() as (_, channel):
        assert (await tokenize(channel, "x" * 5_000_000)).token_ids == [5_000_000]
        with pytest.raises(aio.AioRpcError) as failure:
            await tokenize(channel, "x" * (MAX_MESSAGE_BYTES + 1))
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_burst_of_calls_is_answered_whole() -> None:
    """The library by itself drops calls at random, as CANCELLED, once 1,000 wait to be taken."""
    async with serving() as (_, channel):
        answers = await asyncio.gather(*(tokenize(channel, "four") for _ in range(2000)))
    assert [list(answer.token_ids) for answer in answers] == [[4]] * 2000


async def test_readiness_is_a_statement_of_the_service() -> None:
    async with serving() as (server, channel):
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", NAME):
            request = health_pb2.HealthCheckRequest(service=name)
            for ready in (False, True, False):
                await server.set_ready(ready=ready)
                expected = "SERVING" if ready else "NOT_SERVING"
                assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.ServingStatus.Value(
                    expected
                )


async def test_readiness_can_be_watched() -> None:
    async with serving() as (server, channel):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.set_ready(ready=True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


async def test_services_can_be_listed() -> None:
    async with serving() as (_, channel):
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        response = await call.read()
        assert {service.name for service in response.list_services_response.service} == {
            NAME,
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        call.cancel()


async def test_a_port_that_is_taken_is_an_error_not_a_theft() -> None:
    async with serving() as (server, _):
        assert server.port is not None
        second = RpcServer()
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{server.port}: the port is in use"):
            await second.start("127.0.0.1", server.port)
        await second.stop(0)
