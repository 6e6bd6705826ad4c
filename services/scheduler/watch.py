"""Snapshots of the engine for those who watch it, and nothing at all while nobody does.

There is no task of its own: whoever needs a fresh look takes it, for all watchers, under one lock. So the workers are
asked at most once every `_FRESH_S`, however many watch, and what has been collected goes when the last watcher does.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, NamedTuple

from services.scheduler.stage_log import StageLog
from shared.errors import OverloadedError
from shared.mesh_view import EngineSnapshot, check_interval

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from services.scheduler.stage_log import TimelineSource
    from shared.clock import Clock
    from shared.ids import StepId
    from shared.messages import EngineStatus

__all__ = ["MAX_WATCHERS", "EngineWatch"]

MAX_WATCHERS = 64
"""Streams at once; each gateway has one for each of its own watchers."""

_FRESH_S = 0.2
"""A look that is not older serves another watcher, too. Below the shortest interval, so that each snapshot is new."""


class _Look(NamedTuple):
    """What all watchers share, from one moment."""

    taken_ns: int
    status: EngineStatus
    logs: tuple[StageLog, ...]
    """One object for each stage and epoch."""
    num_prefill_tokens: int
    """Since somebody began to watch."""


class EngineWatch:
    """Any number of watchers, up to a limit, over one set of timelines."""

    def __init__(
        self,
        status: Callable[[], EngineStatus],
        clock: Clock,
        *,
        connect: Callable[[str], TimelineSource],
    ) -> None:
        """``connect`` reaches a worker by its address."""
        self._status = status
        self._clock = clock
        self._connect = connect
        self._num_watchers = 0
        self._looking = asyncio.Lock()
        self._look: _Look | None = None
        self._epoch: int | None = None
        self._logs: tuple[StageLog, ...] = ()
        self._num_prefill_tokens = 0
        self._closed = asyncio.Event()

    def close(self) -> None:
        """The scheduler leaves: end all streams."""
        self._closed.set()

    async def snapshots(self, interval_s: float) -> AsyncGenerator[EngineSnapshot, None]:
        """Give a snapshot at once and then every ``interval_s`` seconds, until the scheduler leaves.

        Raises:
            InvalidRequestError: the interval is out of range.
            OverloadedError: too many watch already.
        """
        check_interval(interval_s)
        async with self._watching():
            before: _Look | None = None
            seen: dict[StageLog, StepId | None] = {}
            while not self._closed.is_set():
                look = await self._fresh_look()
                snapshot = _snapshot(look, before, seen)
                before = look
                seen = {log: log.last for log in look.logs}
                yield snapshot
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await self._closed.wait()

    @contextlib.asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        if self._num_watchers >= MAX_WATCHERS:
            raise OverloadedError(f"{MAX_WATCHERS} watch this engine already, which is the limit; try again later")
        self._num_watchers += 1
        try:
            yield
        finally:
            self._num_watchers -= 1
            if not self._num_watchers:
                await self._forget()

    async def _fresh_look(self) -> _Look:
        async with self._looking:
            look = self._look
            if look is None or self._clock.now_ns() - look.taken_ns > _FRESH_S * 1e9:
                look = self._look = await self._take_look()
            return look

    async def _take_look(self) -> _Look:
        status = self._status()
        if status.ready and status.epoch != self._epoch:
            await self._forget()
            leaders = [worker for worker in status.workers if worker.tp_rank == 0]
            self._logs = tuple(StageLog(leader.stage, self._connect(leader.address), self._clock) for leader in leaders)
            self._epoch = status.epoch
        if status.ready:
            num_prefill_tokens = await asyncio.gather(*(log.fetch() for log in self._logs))
            self._num_prefill_tokens += sum(num_prefill_tokens[:1])  # every stage has the same iterations
        return _Look(self._clock.now_ns(), self._status(), self._logs, self._num_prefill_tokens)

    async def _forget(self) -> None:
        """Let go of all that was collected."""
        logs, self._logs, self._epoch, self._look = self._logs, (), None, None
        for log in logs:
            await log.close()


def _snapshot(look: _Look, before: _Look | None, seen: dict[StageLog, StepId | None]) -> EngineSnapshot:
    stages = tuple(log.after(seen.get(log)) for log in look.logs)
    elapsed_s = 0.0 if before is None else (look.taken_ns - before.taken_ns) / 1e9
    if before is None or not elapsed_s:
        return EngineSnapshot(look.status, look.taken_ns, stages)
    return EngineSnapshot(
        status=look.status,
        taken_ns=look.taken_ns,
        stages=stages,
        output_tokens_per_s=(look.status.num_output_tokens - before.status.num_output_tokens) / elapsed_s,
        prefill_tokens_per_s=(look.num_prefill_tokens - before.num_prefill_tokens) / elapsed_s,
        steps_per_s=(look.status.num_steps - before.status.num_steps) / elapsed_s,
    )
