"""A request as a span, the top of its tree in this mesh; below it scheduler and workers hang theirs.

It continues the client's trace where there is one. Prompts, outputs and keys are never in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.status import StatusCode
from shared.tracing import Span

if TYPE_CHECKING:
    from services.gateway.observation import RequestRecord
    from shared.tracing import AttributeValue, Tracer

__all__ = ["RequestTracer"]

_OPERATIONS = {"Generate": "text_completion", "Chat": "chat"}
"""As OpenTelemetry's conventions for generative AI name them."""


class RequestTracer:
    """Records a span for each request at its end; a ``RequestObserver``."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def received(self, record: RequestRecord) -> None:
        """Name the request's span, for others to hang theirs below it."""
        record.traceparent = self._tracer.begin(record.caller_traceparent)

    def first_token(self, record: RequestRecord) -> None:
        """The record keeps it."""

    def more_tokens(self, interval_ns: int, num_tokens: int) -> None:
        """Of no interest here."""

    def ended(self, record: RequestRecord) -> None:
        """Record the span."""
        if not record.traceparent:
            return
        operation = _OPERATIONS.get(record.method, record.method)
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.output_tokens": record.num_output_tokens,
            "gen_ai.response.finish_reasons": tuple(finish.reason.name.lower() for finish in record.finishes),
            "orca.request_id": record.request_id,
            "orca.client": record.client,
        }
        failed = record.code is not StatusCode.OK
        if failed:
            attributes["error.type"] = record.code.name
        first_ns = record.first_token_ns
        self._tracer.record(
            Span(
                operation,
                record.received_ns,
                record.ended_ns,
                parent=record.caller_traceparent,
                traceparent=record.traceparent,
                is_entry=True,
                attributes=attributes,
                events=() if first_ns is None else (("first_token", first_ns),),
                error=record.code.name if failed else "",
            )
        )
