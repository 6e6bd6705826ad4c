from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from services.scheduler.tracing import record_sequence
from shared.messages import FinishReason
from tests.factories import SESSION, make_core, make_result, make_submit
from tests.fakes.recording_tracer import RecordingTracer

if TYPE_CHECKING:
    from services.scheduler.core.core import SchedulerCore
    from services.scheduler.core.events import TokenEvent
    from shared.tracing import Span

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def submit(core: SchedulerCore, *, traceparent: str = PARENT) -> None:
    core.add(SESSION, replace(make_submit(1, prompt=4, max_tokens=3), traceparent=traceparent), now_ns=10)


def spans_of(events: list[TokenEvent], ended_ns: int) -> list[Span]:
    tracer = RecordingTracer()
    for event in events:
        if event.finished is not None:
            assert event.sequence is not None
            record_sequence(tracer, event.sequence, ended_ns, event.error)
    return tracer.spans


def test_queue_prefill_and_decode() -> None:
    core = make_core()
    submit(core)
    events = []
    for now_ns in (20, 40, 60):
        plan = core.schedule(now_ns)
        assert plan is not None
        if now_ns == 20:
            assert plan.new_sequences[0].traceparent == PARENT, "the workers hang theirs below the same span"
        events += core.apply(make_result(plan), now_ns + 10)
    spans = spans_of(events, 75)
    assert [(span.name, span.start_ns, span.end_ns) for span in spans] == [
        ("queue", 10, 20),
        ("prefill", 20, 30),
        ("decode", 30, 75),
    ]
    assert {span.parent for span in spans} == {PARENT}
    assert spans[0].attributes["orca.request_id"] == "request-1"
    assert spans[0].attributes["orca.num_output_tokens"] == 3
    assert spans[0].attributes["orca.finish_reason"] == "length"


def test_who_never_started_was_only_in_the_queue() -> None:
    core = make_core()
    submit(core)
    (span,) = spans_of(core.abort(SESSION, 1), 50)
    assert (span.name, span.start_ns, span.end_ns) == ("queue", 10, 50)
    assert span.attributes["orca.finish_reason"] == FinishReason.CANCELLED.name.lower()


def test_a_failure_is_told_by_the_last_span() -> None:
    core = make_core()
    submit(core)
    plan = core.schedule(20)
    assert plan is not None
    events = core.apply(replace(make_result(plan), invalid=[0]), 30)
    spans = spans_of(events, 31)
    assert [(span.name, bool(span.error)) for span in spans] == [("queue", False), ("prefill", True)]
    assert spans[-1].end_ns == 31


def test_what_is_not_traced_leaves_nothing() -> None:
    core = make_core()
    submit(core, traceparent="")
    assert not spans_of(core.abort(SESSION, 1), 50)
