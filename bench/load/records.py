"""What came of each request, in times of one monotonic clock.

A `Reception` is filled while a request runs, by the client that reads its answer; a `RequestRecord` is what is kept.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

__all__ = ["Outcome", "Reception", "RequestRecord"]


class Outcome(enum.Enum):
    """How a request ended."""

    OK = "ok"
    FAILED = "failed"
    """It was refused, broke off, or took too long."""
    CANCELLED = "cancelled"
    """The run ended first; nobody is to blame."""


@dataclass(slots=True)
class Reception:
    """An answer as it comes; what has come before a failure stays here."""

    event_times_ns: list[int] = field(default_factory=list)
    """When each event that brought output came. An event may have several tokens."""
    ended_ns: int | None = None
    """When the output was whole."""
    num_prompt_tokens: int = 0
    """As the server counts."""
    num_output_tokens: int = 0
    """As the server counts."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, from its start to its end."""

    index: int
    """Place in the trace."""
    outcome: Outcome
    started_ns: int
    """From here latencies count: the time of arrival in an open loop, of sending in a closed one."""
    sent_ns: int
    """When it was sent; in an open loop later than its arrival where the client was late or had to hold it back."""
    ended_ns: int
    """When the output was whole; where it never was, when the request was given up."""
    event_times_ns: tuple[int, ...]
    """When each event that brought output came."""
    num_prompt_tokens: int
    num_output_tokens: int
    """Tokens as the server counts them, 0 before it has told."""
    max_tokens: int
    """Output tokens that were asked for."""
    error: str = ""
    """Why it failed."""

    @property
    def ttft_ms(self) -> float:
        """Time to the first token; of a request that is `Outcome.OK`."""
        first = self.event_times_ns[0] if self.event_times_ns else self.ended_ns
        return (first - self.started_ns) / 1e6

    @property
    def e2e_ms(self) -> float:
        """Time to the last token."""
        return (self.ended_ns - self.started_ns) / 1e6

    @property
    def tpot_ms(self) -> float | None:
        """Mean time of each token after the first; None where there is no other."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e_ms - self.ttft_ms) / (self.num_output_tokens - 1)

    @property
    def normalised_ms(self) -> float:
        """Normalised latency: end to end, by output tokens (ORCA, section 6.2)."""
        return self.e2e_ms / max(1, self.num_output_tokens)
