"""What came of a step on this rank, as the compute thread leaves it.

A tuple that costs next to nothing to make, since it is made between two steps; the messages are built from it on the
event loop's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shared.messages import StepResult, StepTiming

if TYPE_CHECKING:
    from shared.messages import StepPlan

__all__ = ["Outcome"]


class Outcome(NamedTuple):
    """One step that has ended; times in nanoseconds of the host's monotonic clock."""

    plan: StepPlan
    received_ns: int
    started_ns: int
    ended_ns: int
    token_ids: list[int]
    """One for each sequence that samples, in batch order; empty on ranks that sample nothing."""
    invalid: list[int]
    """Indices into ``token_ids`` whose logits were not finite."""

    def timing(self) -> StepTiming:
        """Return when the step passed through this rank."""
        return StepTiming(
            step_id=self.plan.step_id,
            received_ns=self.received_ns,
            started_ns=self.started_ns,
            ended_ns=self.ended_ns,
            num_sequences=len(self.plan.rows),
            num_tokens=sum(self.plan.num_tokens),
            num_decode_tokens=self.plan.num_tokens.count(1),
        )

    def result(self) -> StepResult:
        """Return what the scheduler is to know."""
        return StepResult(
            epoch=self.plan.epoch,
            step_id=self.plan.step_id,
            token_ids=self.token_ids,
            invalid=self.invalid,
            compute_ns=self.ended_ns - self.started_ns,
        )
