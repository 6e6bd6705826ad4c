"""Algorithm 1 step by step: schedule, look, feed a result, look again."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from services.scheduler.core.capacity import Capacity
from services.scheduler.core.core import MAX_LOSSES, SchedulerCore
from shared.errors import InvalidRequestError, OverloadedError, ProtocolError, UnavailableError
from shared.ids import Epoch
from shared.messages import FinishReason, PromptLogprobs, SamplingParams, StepResult, TokenLogprobs
from tests.factories import ORCA, SESSION, make_core, make_result, make_submit

if TYPE_CHECKING:
    from services.scheduler.core.events import TokenEvent


def finished(events: list[TokenEvent]) -> dict[int, FinishReason]:
    return {event.key[1]: event.finished for event in events if event.finished is not None}


def test_nothing_to_do_schedules_nothing() -> None:
    assert make_core().schedule(0) is None


def test_first_iteration_carries_the_whole_prompt_and_the_next_one_token() -> None:
    core = make_core()
    core.add(SESSION, make_submit(prompt=5, max_tokens=3), 0)
    first = core.schedule(0)
    assert first is not None
    assert (first.num_computed_tokens, first.num_tokens, first.samples) == ([0], [5], [True])
    assert list(first.new_sequences[0].token_ids) == [1, 2, 3, 4, 5]
    assert first.num_new_blocks == [2]  # 5 + 3 slots in blocks of 4
    core.apply(make_result(first, token_id=9), 0)
    second = core.schedule(0)
    assert second is not None
    assert (second.num_computed_tokens, second.num_tokens) == ([5], [1])
    assert (second.num_appended_tokens, second.appended_token_ids) == ([1], [9])
    assert second.new_sequences == []
    assert second.num_new_blocks == [0]
    assert second.step_id == first.step_id + 1


def test_ends_at_max_tokens_and_at_a_stop_token() -> None:
    core = make_core()
    core.add(SESSION, make_submit(0, max_tokens=2), 0)
    core.add(SESSION, make_submit(1, max_tokens=9, stop=frozenset({50})), 0)
    plan = core.schedule(0)
    assert plan is not None
    assert finished(core.apply(make_result(plan), 0)) == {}
    plan = core.schedule(0)
    assert plan is not None
    events = core.apply(StepResult(plan.epoch, plan.step_id, [50, 50]), 0)
    assert finished(events) == {0: FinishReason.LENGTH, 1: FinishReason.STOP}
    assert [event.token_id for event in events] == [50, 50]
    assert core.idle
    assert core.stats().num_used_slots == 0


def test_a_prompt_that_is_only_scored_ends_without_a_token() -> None:
    core = make_core()
    core.add(SESSION, make_submit(max_tokens=0, num_prompt_logprobs=2), 0)
    plan = core.schedule(0)
    assert plan is not None
    assert plan.new_sequences[0].num_prompt_logprobs == 2
    scored = PromptLogprobs(1, tuple(TokenLogprobs(-0.5, ((7, -0.1),)) for _ in range(3)))
    events = core.apply(replace(make_result(plan), prompt_logprobs={0: scored}), 0)
    assert [event.prompt_logprobs for event in events] == [scored, None]
    assert [event.token_id for event in events] == [None, None]
    assert finished(events) == {0: FinishReason.LENGTH}
    assert core.idle
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        core.add(SESSION, make_submit(max_tokens=0), 0)


def test_a_scored_prompt_is_computed_in_full_whatever_the_prefix_cache_knows() -> None:
    core = make_core(scheduling=replace(ORCA, prefix_cache=True))
    for handle, num_prompt_logprobs in enumerate((None, None, 0)):
        core.add(SESSION, make_submit(handle, prompt=9, max_tokens=1, num_prompt_logprobs=num_prompt_logprobs), 0)
        plan = core.schedule(0)
        assert plan is not None
        assert plan.num_computed_tokens == [8 if handle == 1 else 0]
        core.apply(make_result(plan), 0)


def test_log_probabilities_come_with_their_token() -> None:
    core = make_core()
    for handle in range(3):
        core.add(SESSION, make_submit(handle), 0)
    plan = core.schedule(0)
    assert plan is not None
    likely = TokenLogprobs(-0.25, ((7, -0.25),))
    events = core.apply(replace(make_result(plan), logprobs={1: likely}), 0)
    assert [event.logprobs for event in events] == [None, likely, None]


def test_selection_stops_at_the_first_that_does_not_fit() -> None:
    core = make_core(num_blocks=4, block_size=4)
    core.add(SESSION, make_submit(0, prompt=8, max_tokens=2), 0)  # 3 blocks
    core.add(SESSION, make_submit(1, prompt=6, max_tokens=2), 0)  # 2 blocks: must wait
    core.add(SESSION, make_submit(2, prompt=1, max_tokens=1), 0)  # 1 block would fit, but nobody overtakes
    plan = core.schedule(0)
    assert plan is not None
    assert len(plan.rows) == 1
    assert core.stats().num_waiting == 2
    core.apply(make_result(plan), 0)
    plan = core.schedule(0)
    assert plan is not None
    core.apply(make_result(plan), 0)
    plan = core.schedule(0)
    assert plan is not None
    assert [sequence.request_id for sequence in plan.new_sequences] == ["request-1", "request-2"]


def test_paper_figure_8_three_stages_batch_of_two() -> None:
    core = make_core(num_stages=3, scheduling=replace(ORCA, max_batch_size=2))
    for handle in range(6):
        core.add(SESSION, make_submit(handle, max_tokens=3), 0)
    plans = [core.schedule(0) for _ in range(3)]
    batches = [[sequence.request_id[-1] for sequence in plan.new_sequences] for plan in plans if plan is not None]
    assert batches == [["0", "1"], ["2", "3"], ["4", "5"]]
    assert core.schedule(0) is None  # as many in flight as there are stages
    assert plans[0] is not None
    core.apply(make_result(plans[0]), 0)
    again = core.schedule(0)
    assert again is not None
    assert again.rows == plans[0].rows  # A and B are the earliest that are free


def test_nothing_selected_waits_for_what_is_outstanding() -> None:
    core = make_core(num_stages=3)
    core.add(SESSION, make_submit(), 0)
    plan = core.schedule(0)
    assert plan is not None
    assert core.schedule(0) is None  # the only request is running
    core.apply(make_result(plan), 0)
    assert core.schedule(0) is not None


def test_abort_while_waiting_running_and_ready() -> None:
    core = make_core(scheduling=replace(ORCA, max_batch_size=1))
    core.add(SESSION, make_submit(0), 0)
    core.add(SESSION, make_submit(1), 0)
    plan = core.schedule(0)
    assert plan is not None
    (waiting,) = core.abort(SESSION, 1)
    (running,) = core.abort(SESSION, 0)
    assert waiting.finished is running.finished is FinishReason.CANCELLED
    assert core.stats().num_used_slots == 0  # at once, not when the iteration comes back
    core.check_invariants()
    assert core.apply(make_result(plan), 0) == []
    assert core.abort(SESSION, 0) == []
    core.add(SESSION, make_submit(2), 0)
    plan = core.schedule(0)
    assert plan is not None
    assert plan.released_rows == [0]
    core.apply(make_result(plan), 0)
    assert len(core.abort(SESSION, 2)) == 1
    assert core.idle


def test_a_closed_session_takes_all_its_requests_along_and_no_other() -> None:
    core = make_core()
    for handle in range(3):
        core.add("one", make_submit(handle), 0)
    core.add("two", make_submit(0), 0)
    assert len(core.abort_session("one")) == 3
    assert core.stats().num_waiting == 1
    core.check_invariants()


def test_engine_lost_recomputes_prompt_and_output_in_the_old_order() -> None:
    core = make_core(scheduling=replace(ORCA, max_batch_size=2))
    for handle in range(3):
        core.add(SESSION, make_submit(handle, prompt=3, max_tokens=4), 0)
    plan = core.schedule(0)
    assert plan is not None
    core.apply(make_result(plan, token_id=9), 0)
    lost = core.schedule(0)
    assert lost is not None
    core.engine_lost()
    core.check_invariants()
    assert core.schedule(0) is None
    core.engine_ready(Epoch(2), Capacity(64, 4, 1, 1024, 1000))
    plan = core.schedule(0)
    assert plan is not None
    assert (plan.epoch, plan.step_id) == (2, 0)
    assert [sequence.request_id for sequence in plan.new_sequences] == ["request-0", "request-1"]
    assert list(plan.new_sequences[0].token_ids) == [1, 2, 3, 9]
    assert plan.new_sequences[0].num_prompt_tokens == 3
    with pytest.raises(ProtocolError, match="epoch"):
        core.apply(make_result(lost), 0)


def test_engine_back_smaller_ends_what_cannot_fit_any_more() -> None:
    core = make_core()
    core.add(SESSION, make_submit(0, prompt=40), 0)
    core.add(SESSION, make_submit(1, prompt=4), 0)
    core.engine_lost()
    events = core.engine_ready(Epoch(2), Capacity(4, 4, 1, 1024, 1000))
    assert finished(events) == {0: FinishReason.ERROR}
    assert "K/V slots" in events[0].error
    plan = core.schedule(0)
    assert plan is not None
    assert [sequence.request_id for sequence in plan.new_sequences] == ["request-1"]


def test_submitted_again_with_output_goes_on_where_it_was() -> None:
    core = make_core()
    core.add(SESSION, make_submit(prompt=3, max_tokens=4, output=3), 0)
    plan = core.schedule(0)
    assert plan is not None
    assert plan.num_tokens == [6]
    assert plan.new_sequences[0].num_prompt_tokens == 3
    assert finished(core.apply(make_result(plan), 0)) == {0: FinishReason.LENGTH}


def test_logits_that_are_not_finite_fail_that_request_alone() -> None:
    core = make_core()
    core.add(SESSION, make_submit(0), 0)
    core.add(SESSION, make_submit(1), 0)
    plan = core.schedule(0)
    assert plan is not None
    events = core.apply(StepResult(plan.epoch, plan.step_id, [0, 8], invalid=[0]), 0)
    assert events[0].finished is FinishReason.ERROR
    assert events[0].token_id is None
    assert events[0].error
    assert (events[1].token_id, events[1].finished) == (8, None)
    core.check_invariants()


@pytest.mark.parametrize(
    ("submit", "message"),
    [
        (make_submit(prompt=0), "at least one"),
        (make_submit(max_tokens=0), "max_tokens is 0"),
        (make_submit(max_tokens=3, output=3), "max_tokens is 3"),
        (make_submit(prompt=1000, max_tokens=25), "context of 1024"),
        (make_submit(prompt=200, max_tokens=57), "256 K/V slots"),
        (make_submit(prompt=1001, max_tokens=1), "vocabulary"),
    ],
)
def test_refused_at_the_door(submit: object, message: str) -> None:
    core = make_core() if "vocab" not in message else make_core(num_blocks=1000)
    with pytest.raises(InvalidRequestError, match=message):
        core.add(SESSION, submit, 0)  # type: ignore[arg-type]
    assert core.idle


def test_exactly_the_pool_fits() -> None:
    core = make_core()
    core.add(SESSION, make_submit(prompt=200, max_tokens=56), 0)
    assert core.schedule(0) is not None
    assert core.stats().num_used_slots == 256


def test_a_full_queue_refuses() -> None:
    core = make_core(scheduling=replace(ORCA, max_waiting=2))
    core.add(SESSION, make_submit(0), 0)
    core.add(SESSION, make_submit(1), 0)
    with pytest.raises(OverloadedError, match="try again"):
        core.add(SESSION, make_submit(2), 0)


def test_a_handle_twice_and_no_engine_yet() -> None:
    core = make_core()
    core.add(SESSION, make_submit(0), 0)
    with pytest.raises(InvalidRequestError, match="in use"):
        core.add(SESSION, make_submit(0), 0)
    with pytest.raises(UnavailableError, match="not ready"):
        SchedulerCore(ORCA).add(SESSION, make_submit(0), 0)


def test_results_out_of_order_or_of_another_size_break_the_contract() -> None:
    core = make_core(num_stages=2, scheduling=replace(ORCA, max_batch_size=1))
    core.add(SESSION, make_submit(0), 0)
    core.add(SESSION, make_submit(1), 0)
    first, second = core.schedule(0), core.schedule(0)
    assert first is not None
    assert second is not None
    with pytest.raises(ProtocolError, match="in order"):
        core.apply(make_result(second), 0)
    with pytest.raises(ProtocolError, match="0 tokens for 1"):
        core.apply(StepResult(first.epoch, first.step_id, []), 0)


def test_times_are_kept_for_each_request() -> None:
    core = make_core()
    core.add(SESSION, make_submit(max_tokens=2), 100)
    plan = core.schedule(150)
    assert plan is not None
    core.apply(make_result(plan), 200)
    plan = core.schedule(200)
    assert plan is not None
    (event,) = core.apply(make_result(plan), 260)
    sequence = event.sequence
    assert sequence is not None
    assert (sequence.arrived_ns, sequence.scheduled_ns) == (100, 150)
    assert (sequence.first_token_ns, sequence.last_token_ns) == (200, 260)


def test_a_decision_takes_under_a_millisecond_at_256_running() -> None:
    core = make_core(num_blocks=256 * 10, scheduling=replace(ORCA, max_batch_size=256), block_size=16)
    for handle in range(300):
        core.add(SESSION, make_submit(handle, prompt=60, max_tokens=90), 0)
    durations = []
    for _ in range(80):
        started = time.thread_time()
        plan = core.schedule(0)
        durations.append(time.thread_time() - started)
        assert plan is not None
        core.apply(make_result(plan), 0)
    assert core.stats().num_running == 256
    assert sorted(durations)[len(durations) // 2] < 1e-3


def test_a_request_that_ends_epoch_after_epoch_fails_alone() -> None:
    core = make_core(scheduling=replace(ORCA, max_batch_size=1))
    core.add(SESSION, make_submit(0), 0)
    core.add(SESSION, make_submit(1, max_tokens=1), 0)
    for epoch in range(2, MAX_LOSSES + 2):
        assert core.schedule(0) is not None
        events = core.engine_lost()
        core.engine_ready(Epoch(epoch), Capacity(64, 4, 1, 1024, 1000))
    assert finished(events) == {0: FinishReason.ERROR}
    plan = core.schedule(0)
    assert plan is not None
    assert [sequence.request_id for sequence in plan.new_sequences] == ["request-1"]
    core.apply(make_result(plan), 0)
    assert core.idle


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=float("nan")), SamplingParams(top_p=5.0)])
def test_sampling_that_makes_no_sense_is_refused(sampling: SamplingParams) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be"):
        make_core().add(SESSION, replace(make_submit(), sampling=sampling), 0)
