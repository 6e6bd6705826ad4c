"""R3: a stream that is quiet for long survives, with our own keepalive and with that of a client that is in a hurry."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from shared import rpc
from shared.rpc import RpcServer, connect

QUIET_S = 6.5
"""A server with default options ends such a stream after 5 s."""
IN_A_HURRY = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


async def quiet(channel: aio.Channel) -> grpc.StatusCode | None:
    """Hold a stream that says nothing; how it ended, or None where it did not."""
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    await call.read()
    try:
        async with asyncio.timeout(QUIET_S):
            code: grpc.StatusCode = await call.code()
            return code
    except TimeoutError:
        return None
    finally:
        call.cancel()


@pytest.mark.slow
async def test_quiet_streams_survive() -> None:
    ours = RpcServer()
    port = await ours.start("127.0.0.1", 0)
    default = aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), default)
    default_port = default.add_insecure_port("127.0.0.1:0")
    await default.start()
    try:
        async with (
            connect(f"127.0.0.1:{port}") as own,
            aio.insecure_channel(f"127.0.0.1:{port}", options=IN_A_HURRY) as hurried,
            aio.insecure_channel(f"127.0.0.1:{default_port}", options=IN_A_HURRY) as refused,
        ):
            ends = await asyncio.gather(quiet(own), quiet(hurried), quiet(refused))
    finally:
        await ours.stop(0)
        await default.stop(0)
    assert list(ends) == [None, None, grpc.StatusCode.UNAVAILABLE], "the last one shows that the test sees it"


def test_both_ends_agree() -> None:
    channel, server = dict(rpc._CHANNEL_OPTIONS), dict(rpc._SERVER_OPTIONS)
    assert channel["grpc.keepalive_time_ms"] >= server["grpc.http2.min_recv_ping_interval_without_data_ms"]
    assert channel["grpc.keepalive_permit_without_calls"] == server["grpc.keepalive_permit_without_calls"] == 1
