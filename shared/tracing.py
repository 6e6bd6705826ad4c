"""Traces: where one request spent its time, over all services, as a tree of spans.

A span is recorded once it is over, from times that the services take anyway, so nothing happens while tokens flow. Its
identity must be known before, since others hang theirs below it: a *traceparent* (W3C Trace Context, level 1), which
travels with the request. The gateway alone begins traces; the others continue what they are told, or nothing.

Knows no OpenTelemetry: `shared.otlp` does, and is imported only where traces are wanted.
"""

from __future__ import annotations

import os
import re
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from shared.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shared.clock import Clock
    from shared.config import ObservabilityConfig

__all__ = [
    "TRACEPARENT_KEY",
    "AttributeValue",
    "Span",
    "TraceContext",
    "Tracer",
    "bind_traceparent",
    "calling_traceparent",
    "open_tracer",
]

AttributeValue = str | int | float | bool | tuple[str, ...]

TRACEPARENT_KEY = "traceparent"
"""HTTP header and gRPC metadata key."""

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_CHARACTERS = 512
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

_CALLING: ContextVar[str] = ContextVar("calling_traceparent", default="")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The identity of a span."""

    trace_id: int
    span_id: int
    is_sampled: bool = True

    @classmethod
    def parse(cls, traceparent: str) -> TraceContext | None:
        """Read a traceparent; None for what is none, which the standard wants ignored."""
        match = _TRACEPARENT.fullmatch(traceparent) if len(traceparent) <= _MAX_CHARACTERS else None
        if match is None or (match[1] == "00" and match[5]):
            return None
        return cls(int(match[2], 16), int(match[3], 16), is_sampled=bool(int(match[4], 16) & 1))

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.is_sampled:02x}"


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a request's way that is over; times are of the service's clock."""

    name: str
    start_ns: int
    end_ns: int
    parent: str = ""
    """Traceparent of the span above; empty: none."""
    traceparent: str = ""
    """Its own, from `Tracer.begin`, where others hang below it; empty where none do."""
    is_entry: bool = False
    """The span in which a service answers a client."""
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    events: tuple[tuple[str, int], ...] = ()
    """(name, when)."""
    error: str = ""
    """What went wrong; never a prompt or a key."""


class Tracer(Protocol):
    """Takes the spans of one process to a collector."""

    def begin(self, parent: str = "") -> str:
        """Return the traceparent of a span that begins; empty where its trace is not recorded."""
        ...

    def record(self, span: Span) -> None:
        """Take a span; never waits."""
        ...

    async def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        ...


def bind_traceparent(traceparent: str) -> None:
    """Say in which span the call is made that the current task serves."""
    _CALLING.set(traceparent)


def calling_traceparent() -> str:
    """Return in which span the call is made that the current task serves; empty where its caller has none."""
    return _CALLING.get()


def open_tracer(service: str, config: ObservabilityConfig, clock: Clock, **attributes: AttributeValue) -> Tracer | None:
    """Return where the spans of this process go; None where they go nowhere.

    The standard variables ``OTEL_…`` are heeded. ``attributes`` are those of the process.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    wanted = config.otlp_endpoint or any(os.environ.get(name) for name in _ENDPOINT_VARIABLES)
    if not wanted or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from shared.otlp import OtlpTracer
    except ImportError as missing:
        raise ConfigError(
            f"traces need OpenTelemetry, which is not installed ({missing}): install the extra, "
            "pip install -e '.[otel]', or leave --otlp-endpoint and OTEL_EXPORTER_OTLP_ENDPOINT away"
        ) from missing
    return OtlpTracer(service, config.otlp_endpoint, clock, attributes)
