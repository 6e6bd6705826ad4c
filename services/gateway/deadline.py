"""When a request must have ended: its own ``timeout_s`` after it came, or with the call that carries it.

A call that has reached its deadline is cancelled, by its client and by gRPC, which looks as if the client had left.
Knows how to tell the two apart. Times are seconds of the event loop's clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import DeadlineExceededError

__all__ = ["Deadline", "first_deadline"]

_EARLY_S = 0.05
_EARLY_SHARE = 0.01
"""gRPC tells a deadline as the time that is left, rounded up to three digits: the client's own runs out before ours."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time, and whose it is."""

    at_s: float
    timeout_s: float
    is_calls: bool
    """It is that of the call."""

    def has_ended_call(self, now_s: float) -> bool:
        """Whether a call that has been cancelled now was cancelled since its time was over."""
        early_s = _EARLY_S + _EARLY_SHARE * self.timeout_s if self.is_calls else 0.0
        return now_s >= self.at_s - early_s

    def missed(self, so_far: str) -> DeadlineExceededError:
        """Return the error of a request that has not ended in time; ``so_far`` goes on from what it says."""
        within = (
            f"{self.timeout_s:.3g} s (the call's deadline)" if self.is_calls else f"{self.timeout_s:g} s (timeout_s)"
        )
        return DeadlineExceededError(f"the request has not ended within its {within}{so_far}")


def first_deadline(now_s: float, timeout_s: float | None, call_timeout_s: float | None) -> Deadline | None:
    """Return what is over first, the request's own time or its call's; None where it has for ever."""
    if call_timeout_s is not None and (timeout_s is None or call_timeout_s < timeout_s):
        return Deadline(now_s + call_timeout_s, call_timeout_s, is_calls=True)
    return None if timeout_s is None else Deadline(now_s + timeout_s, timeout_s, is_calls=False)
