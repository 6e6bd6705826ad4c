"""A sequence's time in the scheduler as spans, made when it ends.

They hang below the span that the gateway named when it submitted the sequence: ``queue``, ``prefill`` and ``decode``,
each as far as the sequence came. A sequence that is not traced costs one look at an empty string.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.tracing import Span

if TYPE_CHECKING:
    from services.scheduler.core.sequence import Sequence
    from shared.tracing import AttributeValue, Tracer

__all__ = ["record_sequence"]


def record_sequence(tracer: Tracer, sequence: Sequence, ended_ns: int, error: str = "") -> None:
    """Record the spans of a sequence that has left the pool."""
    if not sequence.traceparent:
        return
    attributes: dict[str, AttributeValue] = {
        "orca.request_id": sequence.request_id,
        "orca.num_prompt_tokens": sequence.num_prompt_tokens,
        "orca.num_cached_tokens": sequence.num_cached_tokens,
        "orca.num_output_tokens": sequence.num_output_tokens,
        "orca.num_preemptions": sequence.num_preemptions,
    }
    if sequence.finish_reason is not None:
        attributes["orca.finish_reason"] = sequence.finish_reason.name.lower()
    times = [sequence.arrived_ns, sequence.scheduled_ns, sequence.first_token_ns, ended_ns]
    for name, start_ns, end_ns in zip(("queue", "prefill", "decode"), times, times[1:], strict=False):
        if start_ns is None:
            break
        is_last = end_ns is None or name == "decode"
        tracer.record(
            Span(
                name,
                start_ns,
                ended_ns if end_ns is None else end_ns,
                parent=sequence.traceparent,
                attributes=attributes,
                error=error if is_last else "",
            )
        )
