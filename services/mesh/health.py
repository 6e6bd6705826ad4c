"""Asking a service whether it is ready, by ``grpc.health.v1``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.errors import UnavailableError
from shared.rpc import connect, error_from_rpc

if TYPE_CHECKING:
    from shared.tls import TlsCredentials

__all__ = ["check_serving"]


async def check_serving(address: str, *, tls: TlsCredentials | None = None, timeout_s: float = 5.0) -> None:
    """Return where the service at ``address`` serves; raise ``UnavailableError`` where it does not."""
    async with connect(address, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except aio.AioRpcError as failure:
            raise error_from_rpc(failure, f"no answer from {address}") from failure
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise UnavailableError(f"{address} is not ready: {_status_name(answer.status)}")


def _status_name(status: int) -> str:
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
    return name
