"""A tracer that keeps what it is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from shared.tracing import TraceContext

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shared.tracing import Span

__all__ = ["RecordingTracer"]


@dataclass
class RecordingTracer:
    """Traces have the numbers 1, 2, … as ids, and so have spans."""

    spans: list[Span] = field(default_factory=list)
    is_closed: bool = False
    _ids: Iterator[int] = field(default_factory=lambda: count(1))

    def begin(self, parent: str = "") -> str:
        above = TraceContext.parse(parent)
        span_id = next(self._ids)
        return str(TraceContext(span_id if above is None else above.trace_id, span_id))

    def record(self, span: Span) -> None:
        self.spans.append(span)

    async def close(self) -> None:
        self.is_closed = True
