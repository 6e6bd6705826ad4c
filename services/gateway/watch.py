"""The mesh as this gateway sees it, for those who watch: the engine's snapshots, and the gateway's own part.

Each watcher has a stream of its own from the scheduler, where all of them share one look at the workers. A scheduler
that is gone is something to be seen, too: the watch says so, and goes on when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING

from shared.errors import InvalidRequestError, OrcaError, OverloadedError
from shared.mesh_view import EngineSnapshot, MeshSnapshot, check_interval
from shared.messages import EngineStatus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from services.gateway.readiness import Readiness
    from services.gateway.scheduler_client import SchedulerClient

__all__ = ["MAX_WATCHERS", "MeshWatch"]

MAX_WATCHERS = 32
"""Streams at once, over all APIs."""


class MeshWatch:
    """Any number of watchers, up to a limit."""

    def __init__(
        self,
        scheduler: SchedulerClient,
        readiness: Readiness,
        *,
        gateway_id: Callable[[], str],
        num_requests: Callable[[], int],
    ) -> None:
        """``gateway_id`` is host:port, ``num_requests`` what is in service here."""
        self._scheduler = scheduler
        self._readiness = readiness
        self._gateway_id = gateway_id
        self._num_requests = num_requests
        self._num_watchers = 0
        self._closed = asyncio.Event()
        self._waiting: set[asyncio.Timeout] = set()

    def close(self) -> None:
        """The gateway leaves: end all streams."""
        self._closed.set()
        for wait in self._waiting:
            wait.reschedule(0)

    async def snapshots(self, interval_s: float) -> AsyncGenerator[MeshSnapshot, None]:
        """Give a snapshot at once and then every ``interval_s`` seconds, until the gateway leaves.

        Raises:
            InvalidRequestError: the interval is out of range.
            OverloadedError: too many watch already.
        """
        check_interval(interval_s)
        with self._watching():
            while not self._closed.is_set():
                reason = "the scheduler is leaving"
                try:
                    async with contextlib.aclosing(self._scheduler.watch(interval_s)) as engine:
                        while (snapshot := await self._next(engine)) is not None:
                            yield self._seen(snapshot)
                except (InvalidRequestError, OverloadedError):
                    raise
                except OrcaError as lost:
                    reason = str(lost)
                if not self._closed.is_set():
                    yield self._seen(_nothing_seen(reason))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(interval_s):
                            await self._closed.wait()

    async def _next(self, engine: AsyncGenerator[EngineSnapshot, None]) -> EngineSnapshot | None:
        """Wait for a snapshot; None when there will be no more, or the gateway leaves."""
        try:
            async with asyncio.timeout(None) as wait:
                self._waiting.add(wait)
                try:
                    return await anext(engine, None)
                finally:
                    self._waiting.discard(wait)
        except TimeoutError:
            return None

    def _seen(self, engine: EngineSnapshot) -> MeshSnapshot:
        """Return what this gateway says of the engine: not ready where it cannot serve it."""
        missing = self._readiness.missing()
        if engine.status.ready and missing is not None:
            status = dataclasses.replace(engine.status, ready=False, reason=str(missing))
            engine = dataclasses.replace(engine, status=status)
        return MeshSnapshot(engine, self._gateway_id(), self._num_requests())

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        if self._num_watchers >= MAX_WATCHERS:
            raise OverloadedError(f"{MAX_WATCHERS} watch this gateway already, which is the limit; try again later")
        self._num_watchers += 1
        try:
            yield
        finally:
            self._num_watchers -= 1


def _nothing_seen(reason: str) -> EngineSnapshot:
    return EngineSnapshot(EngineStatus(ready=False, reason=reason, epoch=0, info=None, workers=()), taken_ns=0)
