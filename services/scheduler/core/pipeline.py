"""The pipeline: iterations that have been sent and whose results have not come back, oldest first (ORCA §4.2).

At most ``depth`` are in flight: one for each stage, so that every stage has a batch to work on and batches need not be
split into micro-batches; with one stage, one more for each iteration of run-ahead.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from shared.errors import ProtocolError
from shared.ids import StepId

if TYPE_CHECKING:
    from services.scheduler.core.sequence import Sequence

__all__ = ["InFlightStep", "Pipeline"]


class InFlightStep(NamedTuple):
    """One iteration under way."""

    step_id: StepId
    sequences: list[Sequence]
    """In batch order."""
    incarnations: list[int]
    """Of each sequence when it was sent: a result of an earlier one is void."""
    samples: list[bool]
    """Which of them sample a token."""


class Pipeline:
    """A ring of at most ``depth`` iterations; results come back in the order in which iterations were sent."""

    def __init__(self, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"a pipeline has at least one stage, not {depth}")
        self.depth = depth
        self._steps: deque[InFlightStep] = deque()
        self._next_step_id = 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def full(self) -> bool:
        """True when a result must come back before another iteration may be sent."""
        return len(self._steps) >= self.depth

    @property
    def steps(self) -> tuple[InFlightStep, ...]:
        """Iterations in flight, oldest first."""
        return tuple(self._steps)

    def send(self, sequences: list[Sequence], samples: list[bool]) -> StepId:
        """Note a new iteration and number it."""
        if self.full:
            raise AssertionError("the pipeline is full")
        step_id = StepId(self._next_step_id)
        self._next_step_id += 1
        self._steps.append(InFlightStep(step_id, sequences, [s.incarnation for s in sequences], samples))
        return step_id

    def collect(self, step_id: StepId) -> InFlightStep:
        """Take the oldest iteration out; the result must be its own."""
        if not self._steps or self._steps[0].step_id != step_id:
            expected = self._steps[0].step_id if self._steps else "none"
            raise ProtocolError(
                f"result of step {step_id} came back, expected was {expected}: results must come in order"
            )
        return self._steps.popleft()
