from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from services.worker.outcome import Outcome
from services.worker.tracing import StageTracer
from shared.ids import Row
from tests.fakes.fake_worker_peers import columns, sequence
from tests.fakes.recording_tracer import RecordingTracer

if TYPE_CHECKING:
    from shared.codec.step_columns import StepColumns

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NEVER_S = 1e6
MS = 1_000_000


class Stage:
    """Steps of 10 ms each, one after the other."""

    def __init__(self, *, idle_s: float = NEVER_S) -> None:
        self.tracer = RecordingTracer()
        self.observer = StageTracer(self.tracer, 3, idle_s=idle_s)
        self.now_ns = MS

    def compute(self, step: StepColumns) -> None:
        self.observer.step_submitted()
        outcome = Outcome(step, self.now_ns, self.now_ns + 2 * MS, self.now_ns + 10 * MS)
        self.observer.step_ended(outcome, outcome.timing())
        self.now_ns += 10 * MS


def prefill(row: int, num_tokens: int, parent: str = PARENT) -> StepColumns:
    return columns(
        0, (row, 0, num_tokens), new_sequences=[replace(sequence(row, range(num_tokens)), traceparent=parent)]
    )


async def test_a_passage_is_one_span() -> None:
    stage = Stage()
    stage.compute(prefill(0, 20))
    stage.compute(columns(1, (0, 20, 1)))
    stage.compute(columns(2, (0, 21, 1)))
    assert not stage.tracer.spans, "nothing is told before it is over"
    stage.compute(columns(3, released_rows=[0]))
    (span,) = stage.tracer.spans
    assert (span.name, span.parent) == ("stage 3", PARENT)
    assert (span.start_ns, span.end_ns) == (MS, 31 * MS)
    assert dict(span.attributes) == {
        "orca.request_id": "request-0",
        "orca.num_steps": 3,
        "orca.num_tokens": 22,
        "orca.compute_ms": 24.0,
    }
    stage.observer.epoch_over()


async def test_sequences_that_are_not_traced_leave_no_span() -> None:
    stage = Stage()
    stage.compute(prefill(0, 20, parent=""))
    stage.compute(columns(1, released_rows=[0]))
    stage.observer.epoch_over()
    assert not stage.tracer.spans


async def test_a_row_is_used_again() -> None:
    stage = Stage()
    stage.compute(prefill(0, 20))
    stage.compute(prefill(0, 5)._replace(released_rows=[Row(0)]))
    stage.observer.epoch_over()
    assert [span.attributes["orca.num_tokens"] for span in stage.tracer.spans] == [20, 5]


async def test_an_idle_stage_does_not_wait_for_the_next_plan() -> None:
    stage = Stage(idle_s=0.0)
    stage.compute(prefill(0, 20))
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.01, done.set_result, None)
    await done
    assert [span.attributes["orca.num_steps"] for span in stage.tracer.spans] == [1]
    stage.compute(columns(1, (0, 20, 1)))
    stage.compute(columns(2, released_rows=[0]))
    assert [span.attributes["orca.num_steps"] for span in stage.tracer.spans] == [1, 1]
    assert stage.tracer.spans[1].start_ns == 11 * MS


async def test_an_epoch_takes_its_passages_along() -> None:
    stage = Stage()
    stage.compute(prefill(0, 20))
    stage.observer.step_submitted()
    stage.observer.epoch_over()
    stage.observer.epoch_over()
    assert len(stage.tracer.spans) == 1
    stage.compute(columns(0, released_rows=[0]))
    assert len(stage.tracer.spans) == 1
