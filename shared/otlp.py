"""Spans to an OpenTelemetry collector: OTLP over HTTP, in batches, from a thread of the library.

HTTP, so that no second gRPC stack lives beside asyncio's. Sampling, headers, time limits and the rest are the
library's, set by the standard ``OTEL_…`` variables. A collector that is away costs spans, never requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from importlib.metadata import version
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision

from shared.log import get_logger
from shared.tracing import TraceContext

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shared.clock import Clock
    from shared.tracing import AttributeValue, Span

__all__ = ["OtlpTracer"]

_CLOSE_TIMEOUT_S = 3.0


class _Ids(IdGenerator):
    """Ids of the next span: those it was given when it began, or new ones."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self.given: TraceContext | None = None

    def generate_trace_id(self) -> int:
        return self._random.generate_trace_id() if self.given is None else self.given.trace_id

    def generate_span_id(self) -> int:
        return self._random.generate_span_id() if self.given is None else self.given.span_id


class OtlpTracer:
    """A `Tracer`; for the event loop's thread alone."""

    def __init__(
        self, service: str, endpoint: str, clock: Clock, attributes: Mapping[str, AttributeValue] | None = None
    ) -> None:
        """``endpoint`` is the base URL of the collector; empty leaves it to the standard variables."""
        self._clock = clock
        self._ids = _Ids()
        name = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": f"orca-{service}"}
        about = {**name, "service.namespace": "orca", "service.version": version("orca-mesh"), **(attributes or {})}
        self._provider = TracerProvider(resource=Resource.create(about), id_generator=self._ids, shutdown_on_exit=False)
        _log_failures()
        self._exporter: SpanExporter = OTLPSpanExporter(
            endpoint=f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("orca", version("orca-mesh"))

    def begin(self, parent: str = "") -> str:
        """Return the traceparent of a span that begins; empty where its trace is not recorded."""
        above = TraceContext.parse(parent)
        self._ids.given = None
        trace_id = self._ids.generate_trace_id() if above is None else above.trace_id
        sampled = self._provider.sampler.should_sample(_context(above), trace_id, "orca")
        if sampled.decision is not Decision.RECORD_AND_SAMPLE:
            return ""
        return str(TraceContext(trace_id, self._ids.generate_span_id()))

    def record(self, span: Span) -> None:
        """Take a span; never waits."""
        self._ids.given = TraceContext.parse(span.traceparent)
        to_epoch_ns = time.time_ns() - self._clock.now_ns()
        recorded = self._tracer.start_span(
            span.name,
            context=_context(TraceContext.parse(span.parent)),
            kind=trace.SpanKind.SERVER if span.is_entry else trace.SpanKind.INTERNAL,
            attributes=span.attributes,
            start_time=span.start_ns + to_epoch_ns,
        )
        for name, when_ns in span.events:
            recorded.add_event(name, timestamp=when_ns + to_epoch_ns)
        if span.error:
            recorded.set_status(trace.StatusCode.ERROR, span.error)
        recorded.end(end_time=span.end_ns + to_epoch_ns)

    async def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        # A thread that does not keep the process: the library waits for a dead collector longer than we do.
        closing = threading.Thread(target=self._provider.shutdown, name="otlp-close", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, _CLOSE_TIMEOUT_S)
        if closing.is_alive():
            self._exporter.shutdown()  # no further try


def _context(above: TraceContext | None) -> Context:
    """What OpenTelemetry makes of a parent; the process's own current span never counts."""
    if above is None:
        return Context()
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if above.is_sampled else trace.TraceFlags.DEFAULT)
    parent = trace.SpanContext(above.trace_id, above.span_id, is_remote=True, trace_flags=flags)
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())


class _ToOurLog(logging.Handler):
    """Tells what the library complains of as events of ours; it is about spans that are lost, never more."""

    def emit(self, record: logging.LogRecord) -> None:
        will_try_again = record.levelno < logging.ERROR and record.name.startswith("opentelemetry.exporter")
        log = get_logger().debug if will_try_again else get_logger().warning
        log("trace_export_failed", message=record.getMessage())


def _log_failures() -> None:
    library = logging.getLogger("opentelemetry")
    if not any(isinstance(handler, _ToOurLog) for handler in library.handlers):
        library.addHandler(_ToOurLog(logging.WARNING))
        library.propagate = False
