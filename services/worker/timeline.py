"""When the latest steps passed through this rank, for tests of overlap and for people who look for idle time.

Knows the last 4096 steps of one epoch. Times are of the host's monotonic clock, so that ranks of one host compare.
"""

from __future__ import annotations

from collections import deque
from itertools import islice, takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.ids import StepId
    from shared.messages import StepTiming

__all__ = ["MAX_STEPS", "Timeline"]

MAX_STEPS = 4096
"""Steps that are kept; older ones make room."""


class Timeline:
    """A ring of step timings."""

    def __init__(self) -> None:
        self._timings: deque[StepTiming] = deque(maxlen=MAX_STEPS)

    def add(self, timing: StepTiming) -> None:
        """Add a step that has ended."""
        self._timings.append(timing)

    def latest(self, max_steps: int = 0, *, after: StepId | None = None) -> list[StepTiming]:
        """Return the latest ``max_steps`` steps, those after one step only, oldest first; 0 for all that are kept."""
        newest_first = islice(reversed(self._timings), max_steps or None)
        found = list(takewhile(lambda timing: after is None or timing.step_id > after, newest_first))
        found.reverse()
        return found
