"""What came of a step on this rank, as the compute thread leaves it.

A tuple that costs next to nothing to make, since it is made between two steps; the messages are built from it on the
event loop's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shared.messages import StepResult, StepTiming

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.worker.sampling.prompt_scores import PromptScores
    from services.worker.sampling.sampler import ChosenTokens
    from shared.codec.step_columns import StepColumns

__all__ = ["Outcome"]


class Outcome(NamedTuple):
    """One step that has ended; times in nanoseconds of the host's monotonic clock."""

    plan: StepColumns
    received_ns: int
    started_ns: int
    ended_ns: int
    chosen: ChosenTokens | None = None
    """Of each sequence that samples, in batch order; None where nothing is sampled, or not here."""
    prompt_scores: Sequence[PromptScores] = ()

    def timing(self) -> StepTiming:
        """Return when the step passed through this rank."""
        num_sequences, num_tokens = self.plan.rows.size, self.plan.total_tokens
        is_decode = num_tokens == num_sequences
        return StepTiming(
            step_id=self.plan.step_id,
            received_ns=self.received_ns,
            started_ns=self.started_ns,
            ended_ns=self.ended_ns,
            num_sequences=num_sequences,
            num_tokens=num_tokens,
            num_decode_tokens=num_tokens if is_decode else int((self.plan.num_tokens == 1).sum()),
        )

    def result(self) -> StepResult:
        """Return what the scheduler is to know."""
        chosen = self.chosen
        return StepResult(
            epoch=self.plan.epoch,
            step_id=self.plan.step_id,
            token_ids=[] if chosen is None else chosen.token_ids,
            invalid=[] if chosen is None else chosen.invalid,
            compute_ns=self.ended_ns - self.started_ns,
            logprobs={} if chosen is None or chosen.scores is None else chosen.scores.messages(),
            prompt_logprobs={scored.piece.place: scored.message() for scored in self.prompt_scores},
        )
