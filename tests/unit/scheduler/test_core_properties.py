"""The guarantees of the scheduler on random traces: arrivals, results, cancellations, lost engines, small pools.

Every switch is drawn at random, so each guarantee is shown for plain ORCA, for everything beyond it, and for all
mixtures. The workers are a model that notices a K/V slot read by the wrong request.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.core.capacity import Capacity
from services.scheduler.core.core import MAX_LOSSES
from services.scheduler.core.sequence import Status
from shared.config import SchedulingConfig
from shared.errors import InvalidRequestError
from shared.ids import Epoch, Handle, RequestId
from shared.messages import FinishReason, SamplingParams, Submit, token_ids
from tests.factories import SESSION, make_core
from tests.fakes.model_worker import STOP, ModelWorker, reference

if TYPE_CHECKING:
    from services.scheduler.core.events import TokenEvent
    from shared.messages import StepResult

SWITCHES = st.builds(
    SchedulingConfig,
    max_batch_size=st.integers(1, 4),
    kv_policy=st.sampled_from(["paged", "reserve"]),
    chunked_prefill=st.booleans(),
    max_batch_tokens=st.integers(4, 9),
    prefix_cache=st.booleans(),
    run_ahead=st.integers(0, 2),
    split_over_stages=st.booleans(),
)
BASELINE = st.builds(
    SchedulingConfig,
    max_batch_size=st.integers(1, 4),
    kv_policy=st.just("reserve"),
    chunked_prefill=st.just(value=False),
    prefix_cache=st.booleans(),
    run_ahead=st.just(0),
    batching=st.just("request"),
)
# Few different tokens and common beginnings: the prefix cache has something to find.
PROMPTS = st.lists(st.sampled_from([1, 1, 2]), min_size=1, max_size=12)


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a core as the service does, beside a model of what must hold."""

    switches = SWITCHES

    @initialize(
        data=st.data(), num_blocks=st.integers(1, 12), block_size=st.integers(1, 4), num_stages=st.integers(1, 4)
    )
    def start(self, data: st.DataObject, num_blocks: int, block_size: int, num_stages: int) -> None:
        self.scheduling: SchedulingConfig = data.draw(self.switches)
        self.capacity = Capacity(num_blocks, block_size, num_stages, 1024, 1000)
        self.core = make_core(
            num_blocks=num_blocks, block_size=block_size, num_stages=num_stages, scheduling=self.scheduling
        )
        self.run_ahead = self.scheduling.run_ahead if num_stages == 1 else 0
        self.epoch = 1
        self.next_handle = 0
        self.expected: dict[int, list[int]] = {}  # unfinished requests: what they must get
        self.got: dict[int, list[int]] = {}
        self.unscored: dict[int, set[int]] = {}  # places of prompts whose log probabilities must come yet
        self._new_workers()

    def _new_workers(self) -> None:
        self.worker = ModelWorker(self.capacity.num_blocks, self.capacity.block_size, appends=self.run_ahead > 0)
        self.in_flight: list[StepResult] = []

    @rule(prompt=PROMPTS, max_tokens=st.integers(0, 10), scored=st.booleans())
    def arrive(self, prompt: list[int], max_tokens: int, *, scored: bool) -> None:
        handle = self.next_handle
        self.next_handle += 1
        submit = Submit(
            Handle(handle),
            RequestId(f"request-{handle}"),
            token_ids(prompt),
            max_tokens,
            SamplingParams(),
            frozenset({STOP}),
            num_prompt_logprobs=0 if scored else None,
        )
        if (max_tokens or scored) and -(
            -(len(prompt) + max_tokens) // self.capacity.block_size
        ) <= self.capacity.num_blocks:
            self.core.add(SESSION, submit, 0)
            self.expected[handle] = reference(prompt, max_tokens)
            self.got[handle] = []
            self.unscored[handle] = set(range(1, len(prompt))) if scored else set()
        else:
            with pytest.raises(InvalidRequestError):
                self.core.add(SESSION, submit, 0)

    @rule()
    def schedule(self) -> None:
        self._schedule()

    def _schedule(self) -> bool:
        plan = self.core.schedule(0)
        if plan is None:
            # Nothing to do, or what is outstanding will make it possible: no deadlock.
            assert self.in_flight or not self.expected
            return False
        assert len(self.in_flight) < self.capacity.num_stages + self.run_ahead
        assert 1 <= len(plan.rows) <= self.scheduling.max_batch_size
        if self.scheduling.token_budget is not None:
            assert sum(plan.num_tokens) <= self.scheduling.token_budget
        self.in_flight.append(self.worker.run(plan))
        return True

    @precondition(lambda self: self.in_flight)
    @rule()
    def result(self) -> None:
        self._hear(self.core.apply(self.in_flight.pop(0), 0))

    def _hear(self, events: list[TokenEvent]) -> None:
        for event in events:
            handle = event.key[1]
            assert handle in self.expected, "an event of a request that has ended"
            expected, got = self.expected[handle], self.got[handle]
            if event.prompt_logprobs is not None:
                for place, token in enumerate(event.prompt_logprobs.tokens, event.prompt_logprobs.first_position):
                    assert token.logprob == -place
                    self.unscored[handle].discard(place)
            if event.token_id is not None:
                got.append(event.token_id)
            assert got == expected[: len(got)]
            if event.finished is FinishReason.ERROR:
                assert event.sequence is not None
                assert event.sequence.num_losses == MAX_LOSSES
                del self.expected[handle]
            elif event.finished is not None:
                assert event.finished is (FinishReason.STOP if STOP in expected else FinishReason.LENGTH)
                assert got == expected
                assert not self.unscored[handle]
                del self.expected[handle]

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.expected)))
        first, *others = self.core.abort(SESSION, handle)
        assert (first.key, first.finished) == ((SESSION, handle), FinishReason.CANCELLED)
        del self.expected[handle]
        self._hear(others)

    @rule()
    def lose_engine(self) -> None:
        self._hear(self.core.engine_lost())
        self.epoch += 1
        self._new_workers()
        assert self.core.engine_ready(Epoch(self.epoch), self.capacity) == []

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check_invariants()
        stats = self.core.stats()
        assert stats.num_used_slots <= stats.num_slots
        assert stats.num_running + stats.num_waiting == len(self.expected)
        # Iteration-level first come first served (ORCA §4.2), among those who have anything left to run.
        counts = [
            sequence.num_iterations
            for sequence in self.core._queue.started.values()
            if sequence.status is not Status.FINISHED
            and sequence.num_output_tokens + sequence.num_pending_tokens < sequence.max_tokens
        ]
        assert all(earlier >= later for earlier, later in itertools.pairwise(counts))
        for sequence in self.core._queue.sequences():
            # It computes a block's worth of tokens or so between two preemptions, unless others end and arrive.
            assert sequence.num_preemptions <= 1 + sequence.max_slots

    def teardown(self) -> None:
        """Everybody who was admitted finishes, and then the pool is whole."""
        if not hasattr(self, "core"):
            return
        for _ in range(10_000):
            if not self._schedule():
                if not self.in_flight:
                    break
                self.result()
        assert not self.expected, "a request never ended"
        assert self.core.idle
        self.core.check_invariants()
        stats = self.core.stats()
        assert stats.num_used_slots == 0
        assert self.core._pool.num_available == self.capacity.num_blocks


class BaselineMachine(SchedulerMachine):
    """The same for request-level batching."""

    switches = BASELINE


SchedulerMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
BaselineMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestScheduler = SchedulerMachine.TestCase
TestBaseline = BaselineMachine.TestCase
