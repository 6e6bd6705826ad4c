"""A gateway over real gRPC with a scripted scheduler behind it and a client in front."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.gateway.app import run_gateway
from services.gateway.served_model import load_model_text
from shared.client import GatewayClient
from shared.config import GatewayConfig, ListenConfig
from shared.lifecycle import Shutdown
from shared.rpc import connect
from tests.fakes.fake_scheduler import FakeScheduler, FakeSession

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from services.gateway.served_model import ModelText
    from shared.tls import TlsCredentials


@dataclass
class RunningGateway:
    """A gateway of this process; ``session`` is its latest one at the scheduler."""

    scheduler: FakeScheduler
    session: FakeSession
    client: GatewayClient
    shutdown: Shutdown
    task: asyncio.Task[None]
    tls: TlsCredentials | None = None

    @property
    def address(self) -> str:
        return self.session.gateway_id

    async def health(self, *, serving: bool) -> None:
        """Wait until the health service says so."""
        wanted = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        async with asyncio.timeout(10), connect(self.address, self.tls) as channel:
            call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="orca.v1.Gateway"))
            async for answer in call:
                if answer.status == wanted:
                    call.cancel()
                    return

    async def reconnected(self) -> FakeSession:
        """Wait for the gateway's next session."""
        self.session = await self.scheduler.session()
        return self.session


class StartGateway(Protocol):
    def __call__(
        self,
        *,
        scheduler: FakeScheduler | None = None,
        max_requests: int = 8,
        max_queued: int = 0,
        grace_s: float = 0.0,
        load: Callable[[str], ModelText] = load_model_text,
        api_key: str | None = None,
        client_tls: TlsCredentials | None = None,
        **fields: Any,
    ) -> contextlib.AbstractAsyncContextManager[RunningGateway]: ...


@contextlib.asynccontextmanager
async def _start(
    *,
    scheduler: FakeScheduler | None = None,
    max_requests: int = 8,
    max_queued: int = 0,
    grace_s: float = 0.0,
    load: Callable[[str], ModelText] = load_model_text,
    api_key: str | None = None,
    client_tls: TlsCredentials | None = None,
    **fields: Any,
) -> AsyncIterator[RunningGateway]:
    """``api_key`` and ``client_tls`` are the client's, ``fields`` those of the gateway's configuration."""
    async with scheduler or FakeScheduler() as fake:
        config = GatewayConfig(
            scheduler=fake.address,
            listen=ListenConfig(port=0),
            max_requests=max_requests,
            max_queued=max_queued,
            **fields,
        )
        shutdown = Shutdown(grace_s)
        task = asyncio.create_task(run_gateway(config, shutdown, load=load))
        try:
            session = await fake.session()
            async with GatewayClient(session.gateway_id, api_key=api_key, tls=client_tls) as client:
                yield RunningGateway(fake, session, client, shutdown, task, client_tls)
        finally:
            shutdown.request("the test has ended")
            await asyncio.wait_for(task, 20)


@pytest.fixture
def start_gateway() -> StartGateway:
    """Start a gateway with options of the test's own; its session is open, the engine told as the fake is set up."""
    return _start


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    """A gateway that serves."""
    async with _start() as running:
        await running.health(serving=True)
        yield running


@pytest.fixture
def unused_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
