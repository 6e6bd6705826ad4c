"""Scheduler and workers: control messages down the stages, results and timings back.

How a worker takes a control message is in ``shared.codec.step_columns``: this module does without NumPy.
"""

from __future__ import annotations

from shared.codec.engine import sampling_to_pb
from shared.codec.logprobs import indexed_from_pb, logprobs_to_pb, prompt_logprobs_from_pb
from shared.codec.timings import put_timings, timings_of
from shared.ids import Epoch, StepId
from shared.messages import StepPlan, StepResult, StepTiming
from shared.pb import worker_pb2

__all__ = [
    "step_plan_to_pb",
    "step_result_from_pb",
    "step_result_to_pb",
    "timeline_from_pb",
    "timeline_to_pb",
]


def step_plan_to_pb(plan: StepPlan) -> worker_pb2.StepPlan:
    """Translate."""
    return worker_pb2.StepPlan(
        epoch=plan.epoch,
        step_id=plan.step_id,
        released_rows=plan.released_rows,
        new_sequences=[
            worker_pb2.NewSequence(
                row=sequence.row,
                request_id=sequence.request_id,
                token_ids=sequence.token_ids,
                num_prompt_tokens=sequence.num_prompt_tokens,
                sampling=sampling_to_pb(sequence.sampling),
                stop_token_ids=sorted(sequence.stop_token_ids),
                num_prompt_logprobs=sequence.num_prompt_logprobs,
                grammar=sequence.grammar,
                traceparent=sequence.traceparent,
            )
            for sequence in plan.new_sequences
        ],
        rows=plan.rows,
        num_computed_tokens=plan.num_computed_tokens,
        num_tokens=plan.num_tokens,
        samples=plan.samples,
        num_appended_tokens=plan.num_appended_tokens,
        appended_token_ids=plan.appended_token_ids,
        num_new_blocks=plan.num_new_blocks,
        new_block_ids=plan.new_block_ids,
    )


def step_result_to_pb(result: StepResult) -> worker_pb2.StepResult:
    """Translate."""
    return worker_pb2.StepResult(
        epoch=result.epoch,
        step_id=result.step_id,
        token_ids=result.token_ids,
        invalid=result.invalid,
        compute_ns=result.compute_ns,
        logprob_indices=result.logprobs.keys(),
        logprobs=logprobs_to_pb(result.logprobs.values()),
        prompt_logprobs=[
            worker_pb2.StepPromptLogprobs(
                index=index, first_position=piece.first_position, logprobs=logprobs_to_pb(piece.tokens)
            )
            for index, piece in result.prompt_logprobs.items()
        ],
    )


def step_result_from_pb(message: worker_pb2.StepResult) -> StepResult:
    """Translate."""
    return StepResult(
        epoch=Epoch(message.epoch),
        step_id=StepId(message.step_id),
        token_ids=list(message.token_ids),
        invalid=list(message.invalid),
        compute_ns=message.compute_ns,
        logprobs=indexed_from_pb(message.logprob_indices, message.logprobs),
        prompt_logprobs={
            piece.index: prompt_logprobs_from_pb(piece.first_position, piece.logprobs)
            for piece in message.prompt_logprobs
        },
    )


def timeline_to_pb(stage: int, tp_rank: int, timings: list[StepTiming], now_ns: int) -> worker_pb2.GetTimelineResponse:
    """Translate; ``now_ns`` is the present by the clock of the timings."""
    message = worker_pb2.GetTimelineResponse(stage=stage, tp_rank=tp_rank, now_ns=now_ns)
    put_timings(message, timings)
    return message


def timeline_from_pb(message: worker_pb2.GetTimelineResponse) -> list[StepTiming]:
    """Translate; oldest step first."""
    return timings_of(message)
