"""An OpenTelemetry collector that takes OTLP over HTTP and keeps what it gets."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CollectedSpan", "OtlpCollector"]


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """A span as it came over the wire; ids in hexadecimal digits."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    kind: int
    attributes: dict[str, Any]
    events: tuple[str, ...]
    error: str


@dataclass
class OtlpCollector:
    """Listens for as long as the block lasts, in a thread."""

    status: int = 200
    spans: list[CollectedSpan] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def named(self, name: str) -> list[CollectedSpan]:
        """All spans of a name."""
        return [span for span in self.spans if span.name == name]

    def __enter__(self) -> Self:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.paths.append(self.path)
                if collector.status == 200:
                    collector.spans += _spans(ExportTraceServiceRequest.FromString(body))
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _spans(request: ExportTraceServiceRequest) -> Iterable[CollectedSpan]:
    for group in request.resource_spans:
        service = _attributes(group.resource.attributes)["service.name"]
        for scope in group.scope_spans:
            for span in scope.spans:
                yield CollectedSpan(
                    service=service,
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    kind=span.kind,
                    attributes=_attributes(span.attributes),
                    events=tuple(event.name for event in span.events),
                    error=span.status.message,
                )


def _attributes(pairs: Iterable[Any]) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
