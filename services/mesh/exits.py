"""How a process of the mesh ended, in words for people."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from shared.errors import UnavailableError

__all__ = ["MeshError", "ServiceExit"]


@dataclass(frozen=True, slots=True)
class ServiceExit:
    """The end of one process."""

    name: str
    """Name within the mesh, e.g. "stage 0.1"."""
    returncode: int
    """Exit code, or the negative number of the signal that killed it."""
    reason: str
    """What it gave as the cause in its last ``service_failed`` event; empty where it said nothing."""
    last_lines: tuple[str, ...]
    """Its latest output, oldest line first."""

    @property
    def summary(self) -> str:
        """One sentence without a full stop: who, how and, where it is known, why."""
        how = f"exited with code {self.returncode}"
        if self.returncode < 0:
            try:
                how = f"was killed by {signal.Signals(-self.returncode).name}"
            except ValueError:  # a real-time signal has no name
                how = f"was killed by signal {-self.returncode}"
        return f"{self.name} {how}" + (f": {self.reason}" if self.reason else "")


class MeshError(UnavailableError):
    """The mesh could not be started, or lost a process; ``exit`` tells of the process where it was one."""

    def __init__(self, message: str, service_exit: ServiceExit | None = None) -> None:
        super().__init__(message)
        self.exit = service_exit
