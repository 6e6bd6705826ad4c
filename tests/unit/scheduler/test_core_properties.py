"""The guarantees of ORCA's scheduler on random traces: arrivals, results, cancellations, lost engines, small pools."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.core.core import Capacity
from services.scheduler.core.sequence import Status
from shared.errors import InvalidRequestError
from shared.ids import Epoch
from shared.messages import FinishReason, StepPlan, StepResult
from tests.factories import SESSION, make_core, make_submit

if TYPE_CHECKING:
    from services.scheduler.core.core import TokenEvent

STOP = 99


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a core as the service does, beside a model of what must hold."""

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 4),
        num_stages=st.integers(1, 4),
        max_batch_size=st.integers(1, 4),
    )
    def start(self, num_blocks: int, block_size: int, num_stages: int, max_batch_size: int) -> None:
        self.capacity = Capacity(num_blocks, block_size, num_stages, 1024, 1000)
        self.max_batch_size = max_batch_size
        self.core = make_core(
            num_blocks=num_blocks, block_size=block_size, num_stages=num_stages, max_batch_size=max_batch_size
        )
        self.epoch = 1
        self.next_handle = 0
        self.next_step = 0
        self.in_flight: list[StepPlan] = []
        self.limits: dict[int, int] = {}  # unfinished requests: max_tokens
        self.tokens: dict[int, int] = {}
        # A model of the workers' tables, fed by the diffs alone.
        self.rows: dict[int, str] = {}
        self.row_tokens: dict[int, int] = {}
        self.row_blocks: dict[int, list[int]] = {}

    @rule(prompt=st.integers(1, 10), max_tokens=st.integers(1, 8))
    def arrive(self, prompt: int, max_tokens: int) -> None:
        handle = self.next_handle
        self.next_handle += 1
        fits = -(-(prompt + max_tokens) // self.capacity.block_size) <= self.capacity.num_blocks
        submit = make_submit(handle, prompt=prompt, max_tokens=max_tokens, stop=frozenset({STOP}))
        if fits:
            self.core.add(SESSION, submit, 0)
            self.limits[handle] = max_tokens
            self.tokens[handle] = 0
        else:
            with pytest.raises(InvalidRequestError):
                self.core.add(SESSION, submit, 0)

    @rule()
    def schedule(self) -> None:
        plan = self.core.schedule(0)
        if plan is None:
            self._must_be_right_to_wait()
            return
        assert len(self.in_flight) < self.capacity.num_stages
        assert 1 <= len(plan.rows) <= self.max_batch_size
        assert plan.step_id == self.next_step
        self.next_step += 1
        self._learn(plan)
        self.in_flight.append(plan)

    def _must_be_right_to_wait(self) -> None:
        if len(self.in_flight) == self.capacity.num_stages:
            return
        started, waiting = self.core._started.values(), self.core._waiting.values()
        assert all(sequence.status is Status.RUNNING for sequence in started)
        if waiting:
            need = self.core._pool.blocks_for(next(iter(waiting)).max_slots)
            assert need > self.core._pool.num_free
            assert self.in_flight  # what is outstanding will free blocks: no deadlock

    def _learn(self, plan: StepPlan) -> None:
        """What a worker does with a plan; every index must make sense to it."""
        for row in plan.released_rows:
            del self.rows[row], self.row_tokens[row], self.row_blocks[row]
        for sequence in plan.new_sequences:
            assert sequence.row not in self.rows
            self.rows[sequence.row] = sequence.request_id
            self.row_tokens[sequence.row] = len(sequence.token_ids)
            self.row_blocks[sequence.row] = []
        blocks = iter(plan.new_block_ids)
        for row, computed, count, samples, appended, new_blocks in zip(
            plan.rows,
            plan.num_computed_tokens,
            plan.num_tokens,
            plan.samples,
            plan.num_appended_tokens,
            plan.num_new_blocks,
            strict=True,
        ):
            self.row_tokens[row] += appended
            self.row_blocks[row] += [next(blocks) for _ in range(new_blocks)]
            assert computed + count <= self.row_tokens[row]
            assert samples == (computed + count == self.row_tokens[row])
            assert computed + count <= len(self.row_blocks[row]) * self.capacity.block_size
        assert next(blocks, None) is None

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def result(self, data: st.DataObject) -> None:
        plan = self.in_flight.pop(0)
        count = sum(plan.samples)
        token_ids = data.draw(st.lists(st.sampled_from([5, 5, 5, STOP]), min_size=count, max_size=count))
        self._hear(self.core.apply(StepResult(plan.epoch, plan.step_id, token_ids), 0))

    def _hear(self, events: list[TokenEvent]) -> None:
        for event in events:
            handle = event.key[1]
            assert handle in self.limits, "an event of a request that has ended"
            if event.token_id is not None:
                self.tokens[handle] += 1
            assert self.tokens[handle] <= self.limits[handle]
            if event.finished is FinishReason.STOP:
                assert event.token_id == STOP
            elif event.finished is FinishReason.LENGTH:
                assert self.tokens[handle] == self.limits[handle]
            else:
                assert event.finished is None
                assert event.token_id != STOP
            if event.finished is not None:
                del self.limits[handle]

    @precondition(lambda self: self.limits)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.limits)))
        assert self.core.abort(SESSION, handle) is not None
        del self.limits[handle]

    @rule()
    def lose_engine(self) -> None:
        self.core.engine_lost()
        self.epoch += 1
        self.in_flight.clear()
        self.rows.clear()
        self.row_tokens.clear()
        self.row_blocks.clear()
        self.next_step = 0
        assert self.core.engine_ready(Epoch(self.epoch), self.capacity) == []

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check_invariants()
        stats = self.core.stats()
        assert stats.num_reserved_slots <= stats.num_slots
        assert stats.num_running + stats.num_waiting == len(self.limits)
        # Iteration-level first come first served (ORCA §4.2).
        counts = [sequence.num_iterations for sequence in self.core._started.values()]
        assert all(earlier >= later for earlier, later in itertools.pairwise(counts))

    def teardown(self) -> None:
        """Everybody who was admitted finishes, and then the pool is whole."""
        if not hasattr(self, "core"):
            return
        for _ in range(10_000):
            plan = self.core.schedule(0)
            if plan is not None:
                self.in_flight.append(plan)
            elif self.in_flight:
                oldest = self.in_flight.pop(0)
                self._hear(self.core.apply(StepResult(oldest.epoch, oldest.step_id, [5] * sum(oldest.samples)), 0))
            else:
                break
        assert not self.limits, "a request never ended"
        assert self.core.idle
        assert self.core.stats().num_reserved_slots == 0
        assert self.core._pool.num_free == self.capacity.num_blocks


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestScheduler = SchedulerMachine.TestCase
