"""What becomes of requests, told as it happens to whoever wants to know: the access log, metrics, traces.

Observers are called on the event loop, and never wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from shared.log import get_logger
from shared.status import StatusCode

if TYPE_CHECKING:
    from shared.generation import Finish

__all__ = ["AccessLog", "RequestObserver", "RequestRecord"]


@dataclass(slots=True)
class RequestRecord:
    """One request, as far as it has come; times are of the gateway's clock, nanoseconds."""

    method: str
    """"Generate" or "Chat", whatever the API."""
    client: str
    received_ns: int
    caller_traceparent: str = ""
    """The client's own span, where it told one."""
    traceparent: str = ""
    """The span of this request, where it is traced."""
    request_id: str = ""
    """Known once the request has been looked at."""
    num_prompt_tokens: int = 0
    """Of all prompts; known once it is accepted."""
    num_output_tokens: int = 0
    """Of all outputs so far; set at the end."""
    first_token_ns: int | None = None
    last_token_ns: int = 0
    """When the latest tokens went to the client; once there is a first one."""
    ended_ns: int = 0
    code: StatusCode = StatusCode.CANCELLED
    """How it ended: OK, or the status of its error; CANCELLED where the client left, in time, which nobody tells."""
    finishes: list[Finish] = field(default_factory=list)
    """How its outputs ended, those of ``best_of`` that were dropped included; some of a request that failed."""


class RequestObserver(Protocol):
    """Somebody who wants to know of every request."""

    def received(self, record: RequestRecord) -> None:
        """A request has come in; `ended` will follow."""

    def first_token(self, record: RequestRecord) -> None:
        """Its first token goes to the client."""

    def more_tokens(self, interval_ns: int, num_tokens: int) -> None:
        """More of them go, in one delta or several; ``interval_ns`` is the time for each of one output."""

    def ended(self, record: RequestRecord) -> None:
        """It has ended, in whatever way."""


class AccessLog:
    """One line in the log for each request, at its end. Prompts and outputs are never in it."""

    def received(self, record: RequestRecord) -> None:
        """Nothing to tell yet."""

    def first_token(self, record: RequestRecord) -> None:
        """Nothing to tell yet."""

    def more_tokens(self, interval_ns: int, num_tokens: int) -> None:
        """Nothing to tell yet."""

    def ended(self, record: RequestRecord) -> None:
        """Log the line."""
        first_ns = record.first_token_ns
        get_logger().info(
            "request_ended",
            request_id=record.request_id,
            client=record.client,
            method=record.method,
            code=record.code.name,
            finish_reasons=[finish.reason.name.lower() for finish in record.finishes],
            num_prompt_tokens=record.num_prompt_tokens,
            num_output_tokens=record.num_output_tokens,
            first_token_ms=None if first_ns is None else round((first_ns - record.received_ns) / 1e6, 3),
            total_ms=round((record.ended_ns - record.received_ns) / 1e6, 3),
            **({"trace_id": record.traceparent.split("-")[1]} if record.traceparent else {}),
        )
