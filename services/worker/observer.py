"""Who is told, on the event loop, of what passes through this rank; metrics and traces are made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from services.worker.outcome import Outcome
    from shared.messages import Joined, StepTiming

__all__ = ["StepObserver"]


class StepObserver(Protocol):
    """Takes note, and never waits: it is called between two steps."""

    def epoch_began(self, joined: Joined) -> None:
        """This rank is in an epoch."""

    def step_submitted(self) -> None:
        """A step was put before the compute thread."""

    def step_ended(self, outcome: Outcome, timing: StepTiming) -> None:
        """A step was computed; steps end in the order in which they were submitted."""

    def epoch_over(self) -> None:
        """The epoch is over: steps that have not ended never will."""
