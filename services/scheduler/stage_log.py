"""The latest iterations of one stage, by the scheduler's clock: asked of the stage's leader, only what is new.

Hosts have monotonic clocks of their own. Each answer carries the worker's present, which lies between our question and
the answer (Cristian 1989): the quickest round trip so far tells the offset best. One that half a round trip explains is
no offset, so that on one host nothing is translated.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

from shared.errors import OrcaError
from shared.mesh_view import MAX_STEPS, StageTimeline

if TYPE_CHECKING:
    from shared.clock import Clock
    from shared.ids import StepId
    from shared.messages import StepTiming
    from shared.worker_client import WorkerTimeline

__all__ = ["StageLog", "TimelineSource"]

_TIMEOUT_S = 1.0
"""A worker that does not answer must not keep watchers from what the others say."""


class TimelineSource(Protocol):
    """What is asked: `shared.worker_client.WorkerClient`."""

    async def timeline(
        self, max_steps: int = 0, *, after: StepId | None = None, timeout_s: float = ...
    ) -> WorkerTimeline:
        """Return the latest steps after one step, and the worker's present. Raises ``OrcaError``."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class StageLog:
    """Iterations of one stage in one epoch; the latest `MAX_STEPS` are kept."""

    def __init__(self, stage: int, worker: TimelineSource, clock: Clock) -> None:
        self.stage = stage
        self._worker = worker
        self._clock = clock
        self._steps: deque[StepTiming] = deque(maxlen=MAX_STEPS)
        self._quickest_ns: int | None = None
        self._offset_ns = 0

    @property
    def last(self) -> StepId | None:
        """The latest iteration that is known."""
        return self._steps[-1].step_id if self._steps else None

    async def fetch(self) -> int:
        """Learn what is new, and return how many tokens of prompts that has; 0 where the worker does not answer."""
        asked_ns = self._clock.now_ns()
        try:
            answer = await self._worker.timeline(after=self.last, timeout_s=_TIMEOUT_S)
        except OrcaError:
            return 0  # its health is told elsewhere
        self._measure_offset(asked_ns, self._clock.now_ns(), answer.now_ns)
        self._steps.extend(map(self._translated, answer.steps))
        return sum(step.num_tokens - step.num_decode_tokens for step in answer.steps)

    def after(self, step_id: StepId | None) -> StageTimeline:
        """Return the iterations after one of them, or all that are kept."""
        newest_first = takewhile(lambda step: step_id is None or step.step_id > step_id, reversed(self._steps))
        return StageTimeline(self.stage, tuple(newest_first)[::-1])

    async def close(self) -> None:
        """Close the connection."""
        await self._worker.close()

    def _measure_offset(self, asked_ns: int, answered_ns: int, present_ns: int) -> None:
        round_trip_ns = answered_ns - asked_ns
        if self._quickest_ns is not None and round_trip_ns >= self._quickest_ns:
            return
        self._quickest_ns = round_trip_ns
        between = asked_ns <= present_ns <= answered_ns
        self._offset_ns = 0 if between else (asked_ns + answered_ns) // 2 - present_ns

    def _translated(self, step: StepTiming) -> StepTiming:
        offset_ns = self._offset_ns
        if not offset_ns:
            return step
        return replace(
            step,
            # Our host may have started after the step.
            received_ns=max(0, step.received_ns + offset_ns),
            started_ns=max(0, step.started_ns + offset_ns),
            ended_ns=max(0, step.ended_ns + offset_ns),
        )
