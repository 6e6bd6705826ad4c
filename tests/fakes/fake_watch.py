"""A scripted `MeshWatch`: everybody who watches is told what a test says, from the latest snapshot on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from shared.ids import StepId
from shared.mesh_view import EngineSnapshot, MeshSnapshot, StageTimeline, check_interval
from shared.messages import EngineStatus, StepTiming, WorkerStatus
from tests.fakes.fake_scheduler import ENGINE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

__all__ = ["BUSY", "FakeWatch", "not_ready"]

_STATUS = EngineStatus(
    ready=True,
    reason="",
    epoch=2,
    info=ENGINE,
    workers=(
        WorkerStatus(0, 0, "127.0.0.1:7001", "ready"),
        WorkerStatus(1, 0, "127.0.0.1:7002", "loading", "weights 40 %"),
    ),
    num_running=3,
    num_waiting=2,
    num_in_flight_steps=2,
    num_used_slots=16,
    num_cached_slots=8,
    num_preempted=1,
    num_preemptions=4,
    num_prompt_tokens=200,
    num_cached_prompt_tokens=50,
    num_steps=40,
    num_output_tokens=1234,
    num_finished=9,
    last_batch_size=3,
    last_batch_tokens=12,
)
_MS = 1_000_000
_TAKEN_NS = 10_000 * _MS


def _steps(late_ms: int) -> tuple[StepTiming, ...]:
    """Forty iterations of 20 ms, one every 25 ms, every eighth with a prompt; the last ended ``late_ms`` ago."""
    steps = []
    for number in range(40):
        ended_ns = _TAKEN_NS - (late_ms + 25 * (39 - number)) * _MS
        tokens = 12 if number % 8 == 0 else 3
        times = (ended_ns - 22 * _MS, ended_ns - 20 * _MS, ended_ns)
        steps.append(StepTiming(StepId(number), *times, 3, tokens, 2 if tokens > 3 else 3))
    return tuple(steps)


BUSY = MeshSnapshot(
    EngineSnapshot(
        _STATUS,
        _TAKEN_NS,
        (StageTimeline(0, _steps(30)), StageTimeline(1, _steps(5))),
        output_tokens_per_s=120.4,
        prefill_tokens_per_s=7.25,
        steps_per_s=40.0,
    ),
    "127.0.0.1:50051",
    5,
)
"""Two stages at work, one of which has just been started again."""


class FakeWatch:
    """Stands where `services.gateway.watch.MeshWatch` would."""

    def __init__(self) -> None:
        self.snapshot = BUSY
        """What the next watcher is told first."""
        self.refusal: Exception | None = None
        self.intervals_s: list[float] = []
        """Of those who came."""
        self.num_watchers = 0
        self._num_ends = 0
        self._left = asyncio.Event()
        self._more = asyncio.Condition()

    async def tell(self, snapshot: MeshSnapshot) -> None:
        """Tell those who watch something else."""
        async with self._more:
            self.snapshot = snapshot
            self._more.notify_all()

    async def end(self) -> None:
        """End the streams of those who watch."""
        async with self._more:
            self._num_ends += 1
            self._more.notify_all()

    async def left(self) -> None:
        """Wait until nobody watches."""
        await asyncio.wait_for(self._left.wait(), 10)

    async def snapshots(self, interval_s: float) -> AsyncGenerator[MeshSnapshot, None]:
        check_interval(interval_s)
        if self.refusal is not None:
            raise self.refusal
        self.intervals_s.append(interval_s)
        self.num_watchers += 1
        self._left.clear()
        try:
            told, num_ends = self.snapshot, self._num_ends
            yield told
            while self._num_ends == num_ends:
                async with self._more:
                    await self._more.wait()
                if self.snapshot is not told:
                    told = self.snapshot
                    yield told
        finally:
            self.num_watchers -= 1
            if not self.num_watchers:
                self._left.set()


def not_ready(reason: str) -> MeshSnapshot:
    """A mesh that serves nobody."""
    status = replace(_STATUS, ready=False, reason=reason)
    return replace(BUSY, engine=replace(BUSY.engine, status=status, stages=()))
