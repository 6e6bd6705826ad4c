"""A real scheduler service in this process, with a gateway's end of a session in the test's hand."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from services.scheduler.app import run_scheduler
from shared.codec.engine import engine_status_from_pb
from shared.codec.session import session_events_from_pb, session_request_to_pb
from shared.config import EngineConfig, ObservabilityConfig, SchedulerConfig, SchedulingConfig
from shared.lifecycle import Shutdown
from shared.messages import Cancel, Ended, EngineStatus, Hello, SessionEvents, Submit
from shared.pb import scheduler_pb2, scheduler_pb2_grpc
from shared.rpc import connect
from shared.topology import Topology
from tests.factories import ORCA

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from grpc import aio


class SchedulerUnderTest:
    """The service, its address and its task."""

    def __init__(self, address: str, task: asyncio.Task[None], shutdown: Shutdown, channel: aio.Channel) -> None:
        self.address = address
        self.task = task
        self.shutdown = shutdown
        self._stub = scheduler_pb2_grpc.SchedulerStub(channel)

    async def status(self) -> EngineStatus:
        response = await self._stub.GetEngineStatus(scheduler_pb2.GetEngineStatusRequest())
        return engine_status_from_pb(response.status)

    async def status_where(self, holds: Callable[[EngineStatus], bool]) -> EngineStatus:
        """Ask until the status is as expected; the test's time limit ends what never comes."""
        while not holds(status := await self.status()):
            pass
        return status

    @contextlib.asynccontextmanager
    async def session(self, *opening: Hello | Submit) -> AsyncIterator[GatewaySession]:
        call = self._stub.Session()
        session = GatewaySession(call)
        for message in opening or (Hello("test-gateway"),):
            await session.send(message)
        try:
            yield session
        finally:
            call.cancel()


class GatewaySession:
    """A gateway's end of a session."""

    def __init__(self, call: aio.StreamStreamCall[scheduler_pb2.SessionRequest, scheduler_pb2.SessionEvents]) -> None:
        self.call = call
        self._messages = aiter(call)
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, Ended] = {}

    async def send(self, message: Hello | Submit | Cancel) -> None:
        await self.call.write(session_request_to_pb(message))

    async def next(self) -> SessionEvents:
        events = session_events_from_pb(await anext(self._messages))
        for handle, token_id in zip(events.token_handles, events.token_ids, strict=True):
            self.tokens.setdefault(handle, []).append(token_id)
        self.ended |= {ended.handle: ended for ended in events.ended}
        return events

    async def until_ended(self, handle: int) -> Ended:
        while handle not in self.ended:
            await self.next()
        return self.ended[handle]

    async def until_tokens(self, handle: int, count: int) -> list[int]:
        while len(self.tokens.get(handle, [])) < count:
            await self.next()
        return self.tokens[handle]


@contextlib.asynccontextmanager
async def running_scheduler(
    *,
    num_stages: int = 1,
    tp_size: int = 1,
    scheduling: SchedulingConfig = ORCA,
    grace_s: float = 5.0,
    collective_timeout_s: int = 60,
    observability: ObservabilityConfig | None = None,
) -> AsyncIterator[SchedulerUnderTest]:
    config = SchedulerConfig(
        observability=observability or ObservabilityConfig(),
        engine=EngineConfig(
            model="test-model",
            topology=Topology(num_stages, tp_size),
            scheduling=scheduling,
            block_size=4,
            collective_timeout_s=collective_timeout_s,
        ),
    )
    shutdown = Shutdown(grace_s)
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run_scheduler(config, shutdown, listening))
    address = await listening
    try:
        async with connect(address) as channel:
            yield SchedulerUnderTest(address, task, shutdown, channel)
    finally:
        shutdown.request("test over")
        if not task.done():
            await task


@pytest.fixture
def start_scheduler() -> Callable[..., contextlib.AbstractAsyncContextManager[SchedulerUnderTest]]:
    return running_scheduler
