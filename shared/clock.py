"""Time as an argument: the system's clock in services, a manual one in tests and in the simulator."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """A source of monotonic time."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary start; never goes back."""
        ...


class SystemClock:
    """The host's monotonic clock, the same for all processes of a host."""

    def now_ns(self) -> int:
        """Read the monotonic clock."""
        return time.monotonic_ns()


@dataclass(slots=True)
class ManualClock:
    """A clock that moves only when told to."""

    time_ns: int = 0

    def now_ns(self) -> int:
        """Return the time last set."""
        return self.time_ns

    def advance(self, duration_ns: int) -> None:
        """Move the clock forward."""
        if duration_ns < 0:
            raise ValueError(f"time does not go back: {duration_ns}")
        self.time_ns += duration_ns
