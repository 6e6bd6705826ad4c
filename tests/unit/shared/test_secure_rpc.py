"""Who gets through to a server of ours: with which certificate, with which key, to which methods."""

from __future__ import annotations

from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shared.errors import ConfigError, UnauthenticatedError
from shared.pb import gateway_pb2, gateway_pb2_grpc
from shared.rpc import RpcServer, connect
from shared.tls import TlsCredentials, TlsFiles, TlsRole
from tests.certificates import Authority

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CALLER: ContextVar[str] = ContextVar("caller", default="nobody")


class Servicer:
    """Tells who called; the other methods are those that answer UNIMPLEMENTED."""

    def __getattr__(self, method: str) -> Any:
        return {"Tokenize": self._tokenize, "Generate": self._generate}.get(method)

    async def _tokenize(self, request: Any, context: Any) -> gateway_pb2.TokenizeResponse:
        return gateway_pb2.TokenizeResponse(token_ids=map(ord, CALLER.get()))

    async def _generate(self, request: Any, context: Any) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        yield gateway_pb2.GenerateResponse(request_id=CALLER.get())


def authenticate(authorization: str | None) -> None:
    if authorization != "Bearer right":
        raise UnauthenticatedError("no key")
    CALLER.set("alice")


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[str]:
    server = RpcServer(**options)
    server.add(gateway_pb2_grpc.add_GatewayServicer_to_server, Servicer(), "orca.v1.Gateway")
    port = await server.start("127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def caller(channel: aio.Channel, key: str | None = None) -> str:
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    stub: Any = gateway_pb2_grpc.GatewayStub(channel)
    response = await stub.Tokenize(gateway_pb2.TokenizeRequest(), metadata=metadata, timeout=10)
    (streamed,) = [part async for part in stub.Generate(gateway_pb2.GenerateRequest(), metadata=metadata, timeout=10)]
    assert streamed.request_id == bytes(response.token_ids).decode()
    return bytes(response.token_ids).decode()


async def status_of(call: Any) -> grpc.StatusCode:
    try:
        await call
    except aio.AioRpcError as failure:
        return failure.code()
    return grpc.StatusCode.OK


async def test_a_key_opens_and_says_who_calls() -> None:
    async with serving(authenticate=authenticate) as address, connect(address) as channel:
        assert await caller(channel, "right") == "alice"
        assert CALLER.get() == "nobody"
    async with serving() as address, connect(address) as channel:
        assert await caller(channel, "right") == "nobody"


@pytest.mark.parametrize("key", [None, "", "wrong", "right right", "s" * 5000])
@pytest.mark.parametrize(
    "path",
    [
        *(f"/orca.v1.Gateway/{method}" for method in ("Generate", "Chat", "Tokenize", "GetModelInfo", "GetStatus")),
        "/orca.v1.Gateway/Absent",
        "//orca.v1.Gateway/Tokenize",
        "/orca.v1.gateway/Tokenize",
        "/orca.v1.Gateway/Tokenize/",
        "/orca.v1.Gateway/Tokenize?key=right",
        "/grpc.health.v1.Health/List",
        "/grpc.health.v1.Health/Check/",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/grpc.channelz.v1.Channelz/GetServers",
        "/",
    ],
)
async def test_without_a_key_no_method_answers(path: str, key: str | None) -> None:
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    async with serving(authenticate=authenticate) as address, connect(address) as channel:
        unary: Any = channel.unary_unary(path)
        assert await status_of(unary(b"", metadata=metadata, timeout=10)) is grpc.StatusCode.UNAUTHENTICATED
        both_stream: Any = channel.stream_stream(path)(metadata=metadata, timeout=10)
        assert await status_of(both_stream.read()) is grpc.StatusCode.UNAUTHENTICATED, "with nothing sent yet"


async def test_a_large_message_without_a_key_is_not_even_read() -> None:
    async with serving(authenticate=authenticate) as address, connect(address) as channel:
        unary: Any = channel.unary_unary("/orca.v1.Gateway/Tokenize")
        assert await status_of(unary(b"x" * (32 << 20), timeout=10)) is grpc.StatusCode.UNAUTHENTICATED


async def test_two_keys_are_as_good_as_none() -> None:
    metadata = (("authorization", "Bearer right"), ("authorization", "Bearer right"))
    async with serving(authenticate=authenticate) as address, connect(address) as channel:
        unary: Any = channel.unary_unary("/orca.v1.Gateway/Tokenize")
        assert await status_of(unary(b"", metadata=metadata, timeout=10)) is grpc.StatusCode.UNAUTHENTICATED


async def test_probes_need_no_key() -> None:
    async with serving(authenticate=authenticate) as address, connect(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=10)
        assert await watch.read()
        watch.cancel()


async def test_with_a_key_reflection_answers_and_unknown_methods_are_unknown() -> None:
    metadata = (("authorization", "Bearer right"),)
    async with serving(authenticate=authenticate) as address, connect(address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=metadata, timeout=10
        )
        assert (await call.read()).list_services_response.service
        call.cancel()
        unary: Any = channel.unary_unary("/orca.v1.Gateway/Absent")
        assert await status_of(unary(b"", metadata=metadata, timeout=10)) is grpc.StatusCode.UNIMPLEMENTED


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def server_tls(ca: Authority, *hosts: str, clients_of: Authority | None = None) -> TlsCredentials:
    pair = ca.pair(*hosts)
    authorities = "" if clients_of is None else clients_of.file
    return TlsFiles(pair.certificate, pair.private_key, authorities, TlsRole.PUBLIC).load()


def client_tls(ca: Authority, signed_by: Authority | None = None) -> TlsCredentials:
    if signed_by is None:
        return TlsFiles(authorities=ca.file).load()
    pair = signed_by.pair("client")
    return TlsFiles(pair.certificate, pair.private_key, ca.file).load()


async def test_tls_to_a_server_of_a_known_authority(ca: Authority) -> None:
    tls = server_tls(ca)
    async with serving(tls=tls, authenticate=authenticate) as address, connect(address, client_tls(ca)) as channel:
        assert await caller(channel, "right") == "alice"


async def test_a_server_of_another_authority_is_not_spoken_to(ca: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    async with serving(tls=server_tls(ca)) as address:
        for tls in (client_tls(other), TlsCredentials(), None):
            async with connect(address, tls) as channel:
                assert await status_of(caller(channel)) is grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_of_another_host_does_not_do(ca: Authority) -> None:
    tls = server_tls(ca, "elsewhere.example")
    async with serving(tls=tls) as address, connect(address, client_tls(ca)) as channel:
        assert await status_of(caller(channel)) is grpc.StatusCode.UNAVAILABLE


async def test_a_server_in_the_clear_is_not_spoken_to_with_tls(ca: Authority) -> None:
    async with serving() as address, connect(address, client_tls(ca)) as channel:
        assert await status_of(caller(channel)) is grpc.StatusCode.UNAVAILABLE


async def test_both_ends_show_a_certificate(ca: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    async with serving(tls=server_tls(ca, clients_of=ca)) as address:
        async with connect(address, client_tls(ca, signed_by=ca)) as channel:
            assert await caller(channel) == "nobody"
        for tls in (client_tls(ca), client_tls(ca, signed_by=other)):
            async with connect(address, tls) as channel:
                assert await status_of(caller(channel)) is grpc.StatusCode.UNAVAILABLE


async def test_a_port_that_is_taken_is_an_error_with_tls_too(ca: Authority) -> None:
    tls = server_tls(ca)
    async with serving(tls=tls) as address:
        second = RpcServer(tls=tls)
        with pytest.raises(ConfigError, match=f"cannot listen at {address}: the port is in use"):
            await second.start("127.0.0.1", int(address.rpartition(":")[2]))
        await second.stop(0)
