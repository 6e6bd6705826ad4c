"""The scheduler's gRPC face towards gateways: sessions, status, watching."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from services.scheduler.outbox import Outbox
from shared.codec.engine import engine_status_to_pb
from shared.codec.mesh_view import engine_snapshot_to_pb
from shared.codec.session import session_events_to_pb, session_request_from_pb
from shared.errors import ProtocolError
from shared.log import get_logger
from shared.messages import Hello
from shared.pb import common_pb2, scheduler_pb2, scheduler_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from grpc import aio

    from services.scheduler.loop import EngineLoop
    from services.scheduler.watch import EngineWatch
    from shared.messages import EngineStatus

__all__ = ["SchedulerServicer"]


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServicer):
    """Sessions of any number of gateways."""

    def __init__(self, loop: EngineLoop, status: Callable[[], EngineStatus], watch: EngineWatch) -> None:
        self._loop = loop
        self._status = status
        self._watch = watch
        self._sessions: set[Outbox] = set()

    async def Session(  # noqa: N802 - the contract's name
        self,
        request_iterator: AsyncIterator[scheduler_pb2.SessionRequest],
        context: aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[scheduler_pb2.SessionEvents]:
        """Take a gateway's commands and tell it what happens, until it leaves."""
        del context
        first = await anext(aiter(request_iterator), None)
        hello = None if first is None else session_request_from_pb(first)
        if not isinstance(hello, Hello):
            raise ProtocolError("a session begins with Hello: gateway and scheduler are of different versions")
        outbox = Outbox(hello.gateway_id)
        get_logger().info("session_opened", gateway_id=hello.gateway_id)
        self._sessions.add(outbox)
        self._loop.open_session(outbox)
        reader = asyncio.create_task(self._read(request_iterator, outbox))
        try:
            while (events := await outbox.take()) is not None:
                yield session_events_to_pb(events)
            if reader.done():
                await reader  # a broken contract ends the session with its error
        finally:
            self._sessions.discard(outbox)
            self._loop.close_session(outbox)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await reader

    async def _read(self, requests: AsyncIterator[scheduler_pb2.SessionRequest], outbox: Outbox) -> None:
        try:
            async for message in requests:
                command = session_request_from_pb(message)
                if isinstance(command, Hello):
                    raise ProtocolError("a session says Hello once")
                self._loop.command(outbox, command)
        finally:
            outbox.close()

    async def GetEngineStatus(  # noqa: N802 - the contract's name
        self, request: scheduler_pb2.GetEngineStatusRequest, context: aio.ServicerContext[Any, Any]
    ) -> scheduler_pb2.GetEngineStatusResponse:
        """Return a snapshot of the engine."""
        del request, context
        return scheduler_pb2.GetEngineStatusResponse(status=engine_status_to_pb(self._status()))

    async def WatchEngine(  # noqa: N802 - the contract's name
        self, request: scheduler_pb2.WatchEngineRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[common_pb2.EngineSnapshot]:
        """Stream snapshots of the engine until the watcher leaves."""
        del context
        async with contextlib.aclosing(self._watch.snapshots(request.interval_ms / 1e3)) as snapshots:
            async for snapshot in snapshots:
                yield engine_snapshot_to_pb(snapshot)

    def close_sessions(self) -> None:
        """End all sessions once what they have to be told is told."""
        for outbox in self._sessions:
            outbox.close()
