"""The HTTP front over real sockets with a scripted generation behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import httpx2
import pytest
import structlog
import uvloop

from services.gateway.api_keys import Authenticator
from services.gateway.app import run_gateway
from services.gateway.http.app import build_app
from services.gateway.http.server import HttpServer
from shared.config import GatewayConfig, HttpConfig, ListenConfig
from shared.lifecycle import Shutdown
from tests.fakes.fake_generation import FakeGeneration
from tests.fakes.fake_scheduler import FakeScheduler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from services.gateway.generation import Generation
    from services.gateway.readiness import Readiness
    from shared.errors import OrcaError
    from shared.tls import TlsFiles
    from tests.fakes.fake_scheduler import FakeSession


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that services run on; where it is about sockets, the standard library's as well."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
    return loops | {"asyncio": asyncio.new_event_loop} if item.path.stem == "test_leaving" else loops


@dataclass
class FakeReadiness:
    """What the probes ask."""

    why_not: OrcaError | None = None
    is_draining: bool = False

    def missing(self) -> OrcaError | None:
        return self.why_not


@dataclass
class RunningFront:
    """An HTTP front of this process and a client of it."""

    server: HttpServer
    client: httpx2.AsyncClient
    generation: FakeGeneration = field(default_factory=FakeGeneration)
    readiness: FakeReadiness = field(default_factory=FakeReadiness)

    @property
    def address(self) -> tuple[str, int]:
        url = httpx2.URL(self.server.address)
        return url.host, url.port or 0

    async def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx2.Response:
        return await self.client.post(path, json=body, **options)

    async def refused(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send what must be refused with 400; the error is returned."""
        response = await self.post(path, body)
        assert response.status_code == 400, response.text
        assert set(response.json()) == {"error"}
        error: dict[str, Any] = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        return error

    def raw(self, path: str, body: dict[str, Any], *, length: int = 0) -> bytes:
        """Bytes of a request; ``length`` is said to be its body's where it is more than that."""
        text = json.dumps(body)
        head = [
            f"POST {path} HTTP/1.1",
            "Host: x",
            "Content-Type: application/json",
            f"Content-Length: {max(length, len(text))}",
        ]
        return "\r\n".join([*head, "", text]).encode()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection of its own."""
        return await asyncio.open_connection(*self.address)


class StartFront(Protocol):
    def __call__(
        self, config: HttpConfig = ..., authenticator: Authenticator = ..., tls: TlsFiles = ...
    ) -> contextlib.AbstractAsyncContextManager[RunningFront]: ...


@contextlib.asynccontextmanager
async def _start(
    config: HttpConfig | None = None, authenticator: Authenticator | None = None, tls: TlsFiles | None = None
) -> AsyncIterator[RunningFront]:
    generation, readiness = FakeGeneration(), FakeReadiness()
    app = build_app(
        config or HttpConfig(),
        cast("Generation", generation),
        cast("Readiness", readiness),
        authenticator or Authenticator(),
    )
    server = HttpServer(app, ListenConfig(port=0), tls)
    serving = asyncio.create_task(server.serve())
    try:
        async with httpx2.AsyncClient(base_url=server.address, timeout=10, verify=False) as client:
            yield RunningFront(server, client, generation, readiness)
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


@pytest.fixture
def start_front() -> StartFront:
    """Start a front with options of the test's own."""
    return _start


@pytest.fixture
async def front() -> AsyncIterator[RunningFront]:
    """A front as it is by default."""
    async with _start() as running:
        yield running


@dataclass
class RunningGateway:
    """A whole gateway of this process, a scripted scheduler behind it and an HTTP client in front."""

    client: httpx2.AsyncClient
    session: FakeSession
    shutdown: Shutdown
    task: asyncio.Task[None]


@contextlib.asynccontextmanager
async def _start_gateway(grace_s: float = 0.0) -> AsyncIterator[RunningGateway]:
    async with FakeScheduler() as scheduler:
        config = GatewayConfig(scheduler.address, ListenConfig(port=0), http=HttpConfig(listen=ListenConfig(port=0)))
        shutdown = Shutdown(grace_s)
        with structlog.testing.capture_logs() as logs:
            task = asyncio.create_task(run_gateway(config, shutdown))
            try:
                session = await scheduler.session()
                url = next(entry["address"] for entry in logs if entry["event"] == "http_listening")
                async with httpx2.AsyncClient(base_url=url, verify=False, timeout=10) as client:
                    async with asyncio.timeout(10):
                        while (await client.get("/ready")).status_code != 200:
                            pass
                    yield RunningGateway(client, session, shutdown, task)
            finally:
                shutdown.request("the test has ended")
                await asyncio.wait_for(task, 20)


class StartGateway(Protocol):
    def __call__(self, grace_s: float = ...) -> contextlib.AbstractAsyncContextManager[RunningGateway]: ...


@pytest.fixture
def start_gateway() -> StartGateway:
    """Start a whole gateway; it is ready."""
    return _start_gateway
