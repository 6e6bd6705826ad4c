"""What goes beyond Algorithm 1, switch by switch: schedule, look, feed a result, look again."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from shared.config import SchedulingConfig
from shared.errors import ConfigError
from shared.ids import Handle, RequestId
from shared.messages import SamplingParams, StepPlan, Submit, token_ids
from tests.factories import ORCA, SESSION, make_core, make_result, make_submit
from tests.fakes.model_worker import STOP, ModelWorker, reference

if TYPE_CHECKING:
    from services.scheduler.core.core import SchedulerCore

PAGED = replace(ORCA, kv_policy="paged")
CHUNKED = replace(ORCA, chunked_prefill=True, max_batch_tokens=16)
CACHED = replace(ORCA, prefix_cache=True)
AHEAD = replace(ORCA, run_ahead=1)


def scheduled(core: SchedulerCore) -> StepPlan:
    plan = core.schedule(0)
    assert plan is not None
    return plan


def step(core: SchedulerCore, token_id: int = 7) -> StepPlan:
    plan = scheduled(core)
    core.apply(make_result(plan, token_id), 0)
    return plan


# --- paged K/V --------------------------------------------------------------------------------------------------------


def test_paged_takes_blocks_as_they_are_needed() -> None:
    core = make_core(scheduling=PAGED)
    core.add(SESSION, make_submit(prompt=4, max_tokens=20), 0)
    assert [step(core).num_new_blocks for _ in range(6)] == [[2], [0], [0], [0], [0], [1]]
    assert core.stats().num_used_slots == 12


def test_a_dry_pool_preempts_the_latest_and_computes_it_again_later() -> None:
    core = make_core(num_blocks=5, scheduling=PAGED)
    core.add(SESSION, make_submit(0, prompt=4, max_tokens=12), 0)
    step(core)
    core.add(SESSION, make_submit(1, prompt=2, max_tokens=12), 0)
    plan = step(core)
    assert plan.num_tokens == [1, 2]
    while core.stats().num_preemptions == 0:
        plan = step(core)
    assert plan.num_tokens == [1]
    assert plan.released_rows == [1]
    assert (core.stats().num_running, core.stats().num_waiting, core.stats().num_preempted) == (1, 1, 1)
    while not (plan := step(core)).new_sequences:
        assert plan.num_tokens == [1]
    (again,) = plan.new_sequences
    assert again.request_id == "request-1"
    assert again.num_prompt_tokens == 2
    assert list(again.token_ids[:2]) == [1, 2]
    assert set(again.token_ids[2:]) == {7}  # the tokens it had are computed again, not sampled again
    core.check_invariants()


def test_the_result_of_a_sequence_preempted_in_flight_is_void() -> None:
    core = make_core(num_blocks=4, num_stages=2, scheduling=replace(PAGED, max_batch_size=1))
    core.add(SESSION, make_submit(0, prompt=6, max_tokens=10), 0)
    core.add(SESSION, make_submit(1, prompt=3, max_tokens=10), 0)
    first, second = scheduled(core), scheduled(core)
    while core.stats().num_preemptions == 0:
        core.apply(make_result(first, 7), 0)
        first, second = second, scheduled(core)
    waiting = next(iter(core._queue.waiting.values()))
    num_tokens = len(waiting.token_ids)
    core.apply(make_result(first, 7), 0)
    assert len(waiting.token_ids) == num_tokens
    core.check_invariants()


def sharegpt_like(core: SchedulerCore, worker: ModelWorker, num_requests: int) -> tuple[float, dict[int, list[int]]]:
    """Run requests whose outputs end long before max_tokens; mean number that run together, and what each got."""
    rng = random.Random(3)
    prompts = {handle: [rng.randint(1, 3) for _ in range(rng.randint(4, 40))] for handle in range(num_requests)}
    for handle, prompt in prompts.items():
        submit = Submit(
            Handle(handle), RequestId(str(handle)), token_ids(prompt), 216, SamplingParams(), frozenset({STOP})
        )
        core.add(SESSION, submit, 0)
    running, got = [], dict[int, list[int]]()
    while (plan := core.schedule(0)) is not None:
        if core.stats().num_waiting:
            running.append(core.stats().num_running)
        for event in core.apply(worker.run(plan), 0):
            if event.token_id is not None:
                got.setdefault(event.key[1], []).append(event.token_id)
    assert all(got[handle] == reference(prompt, 216) for handle, prompt in prompts.items())
    return sum(running) / len(running), got


def test_paged_runs_two_and_a_half_times_as_many_requests_together() -> None:
    together, outputs = {}, {}
    for policy in ("reserve", "paged"):
        scheduling = replace(ORCA, kv_policy=policy, max_batch_size=256)
        core = make_core(num_blocks=8 * 256 // 4, scheduling=scheduling)  # 8 requests of 40 + 216 tokens
        worker = ModelWorker(8 * 256 // 4, 4, appends=False)
        together[policy], outputs[policy] = sharegpt_like(core, worker, num_requests=200)
        assert core.idle
    assert outputs["paged"] == outputs["reserve"]
    assert together["paged"] >= 2.5 * together["reserve"]


# --- chunked prefill --------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_split_and_decodes_come_first() -> None:
    core = make_core(scheduling=CHUNKED)
    core.add(SESSION, make_submit(0, prompt=3, max_tokens=9), 0)
    step(core)
    core.add(SESSION, make_submit(1, prompt=40, max_tokens=2), 0)
    plans = [step(core) for _ in range(4)]
    assert [plan.num_tokens for plan in plans] == [[1, 15], [1, 15], [1, 10], [1, 1]]
    assert [plan.num_computed_tokens[1] for plan in plans] == [0, 15, 30, 40]
    assert [plan.samples for plan in plans] == [[True, False], [True, False], [True, True], [True, True]]


def test_what_is_left_of_the_budget_goes_to_prompts_in_order_of_arrival() -> None:
    core = make_core(scheduling=CHUNKED)
    for handle, prompt in enumerate((10, 10, 10)):
        core.add(SESSION, make_submit(handle, prompt=prompt, max_tokens=2), 0)
    assert step(core).num_tokens == [10, 6]
    assert step(core).num_tokens == [1, 4, 10]


def test_a_budget_below_the_batch_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-batch-tokens"):
        SchedulingConfig(max_batch_size=64, max_batch_tokens=32)
    assert SchedulingConfig(max_batch_size=64, max_batch_tokens=32, chunked_prefill=False).token_budget is None


# --- prefix cache -----------------------------------------------------------------------------------------------------


def test_a_shared_beginning_is_computed_once() -> None:
    core = make_core(scheduling=CACHED)
    core.add(SESSION, make_submit(0, prompt=11, max_tokens=1), 0)
    first = step(core)
    core.add(SESSION, make_submit(1, prompt=10, max_tokens=1), 0)
    second = step(core)
    assert (first.num_computed_tokens, first.num_tokens) == ([0], [11])
    assert (second.num_computed_tokens, second.num_tokens) == ([8], [2])
    assert second.new_block_ids[:2] == first.new_block_ids[:2]
    assert core.stats().num_cached_prompt_tokens == 8
    assert core.stats().num_cached_slots == 8
    core.check_invariants()


def test_the_last_token_is_computed_even_where_all_is_cached() -> None:
    core = make_core(scheduling=CACHED)
    for handle in range(2):
        core.add(SESSION, make_submit(handle, prompt=8, max_tokens=1), 0)
        plan = step(core)
    assert (plan.num_computed_tokens, plan.num_tokens) == ([4], [4])


def test_cached_blocks_are_given_up_least_recently_used_first_and_ends_before_beginnings() -> None:
    core = make_core(num_blocks=4, scheduling=CACHED)
    core.add(SESSION, make_submit(0, prompt=12, max_tokens=1), 0)  # blocks of tokens 1-4, 5-8, 9-12
    step(core)
    assert core.stats().num_cached_slots == 12
    other = Submit(Handle(1), RequestId("other"), token_ids([50] * 5), 1, SamplingParams())
    core.add(SESSION, other, 0)  # two blocks: the free one, and the end of the cached chain
    step(core)
    core.add(SESSION, make_submit(2, prompt=12, max_tokens=1), 0)
    assert scheduled(core).num_computed_tokens == [8]
    core.check_invariants()


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    core = make_core(scheduling=replace(CACHED, kv_policy="paged"))
    core.add(SESSION, make_submit(0, prompt=10, max_tokens=9), 0)
    step(core)
    core._queue.preempt(next(iter(core._queue.started.values())))
    plan = scheduled(core)
    assert plan.num_computed_tokens == [8]
    assert plan.num_tokens == [3]


# --- run-ahead --------------------------------------------------------------------------------------------------------


def test_the_next_iteration_leaves_before_the_tokens_are_back() -> None:
    core = make_core(scheduling=AHEAD)
    core.add(SESSION, make_submit(prompt=4, max_tokens=3), 0)
    first, second = scheduled(core), scheduled(core)
    assert core.schedule(0) is None
    assert (second.num_computed_tokens, second.num_tokens, second.samples) == ([4], [1], [True])
    assert second.num_appended_tokens == [0]  # the worker has its own token
    core.apply(make_result(first), 0)
    third = scheduled(core)
    assert third.num_computed_tokens == [5]
    core.apply(make_result(second), 0)
    assert core.schedule(0) is None  # three tokens are out or on their way: never past max_tokens
    (event,) = core.apply(make_result(third), 0)
    assert event.finished is not None
    assert core.idle


def test_a_request_that_ended_meanwhile_has_its_extra_result_dropped() -> None:
    core = make_core(scheduling=AHEAD)
    core.add(SESSION, make_submit(prompt=4, max_tokens=9, stop=frozenset({50})), 0)
    first, second = scheduled(core), scheduled(core)
    (event,) = core.apply(make_result(first, 50), 0)
    assert event.finished is not None
    assert core.stats().num_used_slots == 0
    assert core.apply(make_result(second, 8), 0) == []
    assert core.idle


def test_several_stages_do_not_run_ahead() -> None:
    core = make_core(num_stages=2, scheduling=AHEAD)
    core.add(SESSION, make_submit(), 0)
    scheduled(core)
    assert core.schedule(0) is None


# --- pipeline-aware batches -------------------------------------------------------------------------------------------


def test_few_requests_are_split_so_that_every_stage_works() -> None:
    core = make_core(num_stages=2, scheduling=replace(ORCA, split_over_stages=True))
    for handle in range(8):
        core.add(SESSION, make_submit(handle), 0)
    assert [len(scheduled(core).rows) for _ in range(2)] == [4, 4]
    unsplit = make_core(num_stages=2)
    for handle in range(8):
        unsplit.add(SESSION, make_submit(handle), 0)
    assert len(scheduled(unsplit).rows) == 8
    assert unsplit.schedule(0) is None


# --- the baseline -----------------------------------------------------------------------------------------------------


def test_request_level_batches_stay_until_the_last_member_ends() -> None:
    core = make_core(scheduling=replace(ORCA, batching="request", max_batch_size=2))
    core.add(SESSION, make_submit(0, prompt=3, max_tokens=1), 0)
    core.add(SESSION, make_submit(1, prompt=5, max_tokens=2), 0)
    core.add(SESSION, make_submit(2, prompt=2, max_tokens=1), 0)
    plan = scheduled(core)
    assert plan.num_tokens == [3, 3]  # all prompts as long as the shortest
    (event,) = core.apply(make_result(plan), 0)
    assert (event.key[1], event.token_id, event.finished) == (0, 7, None)  # it cannot return
    for num_ended in (0, 0, 2):
        plan = scheduled(core)
        assert plan.num_tokens == [1, 1]  # the rest of the longer prompt; the one that ended is computed all the same
        events = core.apply(make_result(plan), 0)
        assert sum(event.finished is not None for event in events) == num_ended
    assert scheduled(core).num_tokens == [2]  # only now the third may start


def test_request_level_micro_batches_over_stages() -> None:
    core = make_core(num_stages=2, scheduling=replace(ORCA, batching="request", max_batch_size=4))
    for handle in range(4):
        core.add(SESSION, make_submit(handle), 0)
    assert [plan.rows for plan in (scheduled(core), scheduled(core))] == [[0, 1], [2, 3]]
    assert core.schedule(0) is None


@pytest.mark.parametrize("wrong", [{"kv_policy": "paged"}, {"chunked_prefill": True}, {"run_ahead": 1}])
def test_request_level_batching_refuses_what_it_cannot_do(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--batching request"):
        replace(ORCA, batching="request", **wrong)


# --- cost -------------------------------------------------------------------------------------------------------------


def test_a_decision_takes_under_a_millisecond_at_256_running_and_10000_waiting() -> None:
    scheduling = SchedulingConfig(max_batch_size=256, max_batch_tokens=1024, max_waiting=20_000)
    core = make_core(num_blocks=256 * 12, block_size=16, scheduling=scheduling)
    for handle in range(10_256):
        core.add(SESSION, make_submit(handle, prompt=60, max_tokens=100), 0)
    durations, in_flight = [], []
    for _ in range(120):
        started = time.thread_time()
        plan = core.schedule(0)
        durations.append(time.thread_time() - started)
        if plan is not None:
            in_flight.append(plan)
        if len(in_flight) == 2:
            core.apply(make_result(in_flight.pop(0)), 0)
    assert core.stats().num_running >= 250
    assert core.stats().num_waiting >= 9_000
    assert sorted(durations[40:])[40] < 1e-3
