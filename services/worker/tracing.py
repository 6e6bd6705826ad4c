"""A sequence's passage through this stage as one span: from its first step here to its last, with what it took.

The control message that introduces a sequence names the span above it. That the sequence has ended is told only with
the next plan, so a passage is also over when the stage has had nothing to do for a while; one that goes on after that,
or after a preemption, is told in several spans.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.ids import Row
from shared.tracing import Span

if TYPE_CHECKING:
    from services.worker.outcome import Outcome
    from shared.ids import RequestId
    from shared.messages import Joined, StepTiming
    from shared.tracing import Tracer

__all__ = ["StageTracer"]

_IDLE_S = 1.0


@dataclass(slots=True)
class _Passage:
    """What a sequence took so far."""

    parent: str
    request_id: RequestId
    num_steps: int = 0
    num_tokens: int = 0
    compute_ns: int = 0
    """Of the steps that it was in; others were in them, too."""
    first_ns: int = 0
    last_ns: int = 0


class StageTracer:
    """The passages of one rank; a ``StepObserver``."""

    def __init__(self, tracer: Tracer, stage: int, *, idle_s: float = _IDLE_S) -> None:
        self._tracer = tracer
        self._stage = stage
        self._idle_s = idle_s
        self._passages: dict[Row, _Passage] = {}
        """Of the sequences that are traced, by row."""
        self._num_pending = 0
        self._idle: asyncio.TimerHandle | None = None

    def epoch_began(self, joined: Joined) -> None:
        """Nothing has passed yet."""

    def step_submitted(self) -> None:
        """Wait for the stage to be idle again."""
        self._num_pending += 1
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def step_ended(self, outcome: Outcome, timing: StepTiming) -> None:
        """Add a step to the passages of its sequences."""
        self._num_pending -= 1
        plan, passages = outcome.plan, self._passages
        for row in plan.released_rows:
            if (passage := passages.pop(row, None)) is not None:
                self._record(passage)
        for sequence in plan.new_sequences:
            if sequence.traceparent:
                passages[sequence.row] = _Passage(sequence.traceparent, sequence.request_id)
        if not passages:
            return
        compute_ns = timing.ended_ns - timing.started_ns
        for place, num_tokens in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True):
            passage = passages.get(Row(place))
            if passage is not None:
                passage.first_ns = passage.first_ns or timing.received_ns
                passage.last_ns = timing.ended_ns
                passage.num_steps += 1
                passage.num_tokens += num_tokens
                passage.compute_ns += compute_ns
        if not self._num_pending:
            self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._record_all)

    def epoch_over(self) -> None:
        """All that passed here has passed."""
        self._num_pending = 0
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        self._record_all()
        self._passages.clear()

    def _record_all(self) -> None:
        """Record what has passed; a sequence that goes on begins a new passage."""
        for passage in self._passages.values():
            self._record(passage)
            passage.num_steps = passage.num_tokens = passage.compute_ns = passage.first_ns = 0

    def _record(self, passage: _Passage) -> None:
        if not passage.num_steps:
            return
        self._tracer.record(
            Span(
                f"stage {self._stage}",
                passage.first_ns,
                passage.last_ns,
                parent=passage.parent,
                attributes={
                    "orca.request_id": passage.request_id,
                    "orca.num_steps": passage.num_steps,
                    "orca.num_tokens": passage.num_tokens,
                    "orca.compute_ms": passage.compute_ns / 1e6,
                },
            )
        )
