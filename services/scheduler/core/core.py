"""The scheduler: ORCA's Algorithm 1 (OSDI '22) and what goes beyond it, as one pure object.

Iterations are selected (``batching``), blocks given and taken (``kv_policy``), plans built (``plan``) and results
applied, without waiting for results while the pipeline has room (``pipeline``). Where nothing can be selected the
caller waits for what is outstanding.

Invariants (``check_invariants``): every sequence that has started arrived before every sequence that waits; every block
is owned as the sequences say, cached or free; a sequence is in one iteration in flight at most, run-ahead excepted;
whoever ended owns nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from services.scheduler.core.batching import Batching, BatchLimits, IterationBatching
from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.capacity import Capacity
from services.scheduler.core.events import SchedulerStats, TokenEvent
from services.scheduler.core.kv_policy import KvPolicy, PagedPolicy, ReservePolicy
from services.scheduler.core.pipeline import Pipeline
from services.scheduler.core.plan import PlanBuilder, RowTable
from services.scheduler.core.queue import RequestQueue
from services.scheduler.core.request_batching import RequestBatching
from services.scheduler.core.sequence import Sequence, Status
from shared.errors import InvalidRequestError, OverloadedError, ProtocolError, UnavailableError
from shared.messages import FinishReason, StepPlan, StepResult, Submit

if TYPE_CHECKING:
    from shared.config import SchedulingConfig
    from shared.ids import Epoch

__all__ = ["MAX_LOSSES", "SchedulerCore"]


MAX_LOSSES = 5
"""Epochs that may end while a request is in flight, without a token of it in between."""


class SchedulerCore:
    """The request pool and every decision about it. Not thread-safe: one task owns it."""

    def __init__(self, config: SchedulingConfig) -> None:
        self._config = config
        self._queue = RequestQueue()
        self._next_arrival = 0
        self._num_steps = 0
        self._num_output_tokens = 0
        self._num_finished = 0
        self._num_prompt_tokens = 0
        self._num_cached_prompt_tokens = 0
        self._last_batch_size = 0
        self._last_batch_tokens = 0
        self._capacity: Capacity | None = None
        self._epoch: Epoch | None = None
        self._set_up_engine(Capacity(1, 1, 1, 1, 1))

    def _set_up_engine(self, capacity: Capacity) -> None:
        """Everything that lives as long as an epoch, empty."""
        config = self._config
        run_ahead = config.run_ahead if capacity.num_stages == 1 else 0
        limits = BatchLimits(
            max_batch_size=config.max_batch_size,
            max_batch_tokens=config.token_budget,
            num_stages=capacity.num_stages,
            run_ahead=run_ahead,
            split_over_stages=config.split_over_stages,
        )
        kv_policy = PagedPolicy if config.kv_policy == "paged" else ReservePolicy
        batching = RequestBatching if config.batching == "request" else IterationBatching
        self._pool = BlockPool(capacity.num_blocks, capacity.block_size)
        self._kv: KvPolicy = kv_policy(self._pool, prefix_cache=config.prefix_cache)
        self._batching: Batching = batching(limits)
        self._pipeline = Pipeline(capacity.num_stages + run_ahead)
        self._rows = RowTable()
        self._workers_append = run_ahead > 0
        self._queue.attach(self._kv, self._rows)

    # --- the engine comes and goes ------------------------------------------------------------------------------------

    def engine_ready(self, epoch: Epoch, capacity: Capacity) -> list[TokenEvent]:
        """The workers have joined an epoch with empty K/V. Requests that cannot fit any more end with an error."""
        if self._epoch is not None:
            raise AssertionError("the engine is ready already")
        self._epoch = epoch
        self._capacity = capacity
        self._set_up_engine(capacity)
        return [
            self._end(sequence, FinishReason.ERROR, error=fault)
            for sequence in list(self._queue.waiting.values())
            if (fault := capacity.size_fault(sequence.num_prompt_tokens, sequence.max_tokens)) is not None
        ]

    def engine_lost(self) -> list[TokenEvent]:
        """The epoch is over: every unfinished request goes back to waiting, in its old place, to be computed again.

        One whose iterations end epoch after epoch may be what ends them: it fails, so that the others can go on.
        """
        self._epoch = None
        events = []
        for sequence in list(self._queue.started.values()):
            sequence.num_losses += sequence.status is Status.RUNNING
            if sequence.status is Status.FINISHED:
                events.append(self._leave(sequence))
            elif sequence.num_losses == MAX_LOSSES:
                message = f"the engine was lost {MAX_LOSSES} times in a row while it computed this request"
                events.append(self._end(sequence, FinishReason.ERROR, error=message))
        self._queue.put_all_back()
        if self._capacity is not None:
            self._set_up_engine(self._capacity)
        return events

    # --- requests come and go -----------------------------------------------------------------------------------------

    def add(self, session: object, request: Submit, now_ns: int) -> None:
        """Take a request into the pool.

        Raises ``InvalidRequestError`` for one that can never be served, ``OverloadedError`` when too many wait and
        ``UnavailableError`` before the engine was first ready.
        """
        capacity = self._capacity
        if capacity is None:
            raise UnavailableError("the engine is not ready yet; try again when the gateway reports ready")
        key = (session, request.handle)
        if self._queue.get(key) is not None:
            raise InvalidRequestError(f"request handle {request.handle} is in use in this session")
        if (fault := capacity.fault_of(request)) is not None:
            raise InvalidRequestError(fault)
        num_waiting = len(self._queue.waiting)
        if num_waiting >= self._config.max_waiting:
            raise OverloadedError(f"{num_waiting} requests wait already, which is the limit; try again later")
        sequence = Sequence(
            key=key,
            request_id=request.request_id,
            arrival=self._next_arrival,
            token_ids=request.prompt_token_ids + request.output_token_ids,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            stop_token_ids=request.stop_token_ids,
            num_prompt_logprobs=request.num_prompt_logprobs,
            grammar=request.grammar,
            traceparent=request.traceparent,
            arrived_ns=now_ns,
        )
        self._next_arrival += 1
        self._queue.add(sequence)

    def abort(self, session: object, handle: int) -> list[TokenEvent]:
        """Drop a request and free all it has at once; nothing happens where there is no such request.

        Safe in mid-flight: each worker runs control messages in order, so what the iteration under way writes to the
        freed blocks is written before a later iteration may use them. Its result is dropped in ``apply``.
        """
        sequence = self._queue.get((session, handle))
        return [] if sequence is None else self._cancel([sequence])

    def abort_session(self, session: object) -> list[TokenEvent]:
        """Drop all requests of a session."""
        return self._cancel([sequence for sequence in self._queue.sequences() if sequence.key[0] == session])

    def _cancel(self, sequences: list[Sequence]) -> list[TokenEvent]:
        events = [self._end(sequence, FinishReason.CANCELLED) for sequence in sequences]
        return events + self._leave_released()

    # --- iterations ---------------------------------------------------------------------------------------------------

    def schedule(self, now_ns: int) -> StepPlan | None:
        """Select the next iteration, or None: the pipeline is full, nothing can be selected, or there is no engine."""
        if self._epoch is None or self._pipeline.full:
            return None
        batch = self._batching.select(self._queue)
        if not batch:
            return None
        builder = PlanBuilder(self._rows, workers_append=self._workers_append)
        for sequence, num_tokens in batch:
            if sequence.scheduled_ns is None:
                sequence.scheduled_ns = now_ns
                self._num_prompt_tokens += sequence.num_prompt_tokens
                self._num_cached_prompt_tokens += sequence.num_cached_tokens
            builder.add(sequence, num_tokens)
            self._kv.computed(sequence)
            if sequence.status is not Status.FINISHED:
                sequence.move_to(Status.RUNNING)
                sequence.num_iterations += 1
        self._num_steps += 1
        self._last_batch_size = len(batch)
        self._last_batch_tokens = builder.total_tokens
        return builder.build(self._epoch, self._pipeline.send([share.sequence for share in batch], builder.samples))

    def apply(self, result: StepResult, now_ns: int) -> list[TokenEvent]:
        """Take the oldest iteration's tokens; returns what its requests should hear, in batch order.

        Raises ``ProtocolError`` for a result of another epoch, out of order or of another size.
        """
        if result.epoch != self._epoch:
            raise ProtocolError(f"result of epoch {result.epoch}, expected was {self._epoch}")
        step = self._pipeline.collect(result.step_id)
        num_tokens = sum(step.samples)
        if len(result.token_ids) != num_tokens:
            raise ProtocolError(f"step {result.step_id}: {len(result.token_ids)} tokens for {num_tokens} sequences")
        events: list[TokenEvent] = []
        index = -1
        members = zip(step.sequences, step.incarnations, step.samples, strict=True)
        for place, (sequence, incarnation, samples) in enumerate(members):
            index += samples
            if sequence.incarnation != incarnation:
                continue  # ended, cancelled or preempted meanwhile
            sequence.num_in_flight -= 1
            sequence.num_pending_tokens -= samples
            if scored := result.prompt_logprobs.get(place):
                events.append(TokenEvent(sequence.key, None, prompt_logprobs=scored))
            if sequence.status is Status.FINISHED:
                continue  # kept by the batching, but it has all its tokens
            if not samples:
                self._settle(sequence)
            elif index in result.invalid:
                message = "the model's logits are not finite numbers for this request, or none matches its grammar"
                events.append(self._end(sequence, FinishReason.ERROR, error=message))
            else:
                event = self._append(sequence, result.token_ids[index], now_ns)
                logprobs = result.logprobs.get(index)
                events.append(event if logprobs is None else event._replace(logprobs=logprobs))
        return events + self._leave_released()

    def _append(self, sequence: Sequence, token_id: int, now_ns: int) -> TokenEvent:
        if sequence.max_tokens == 0:  # asked for the prompt's logprobs only
            return self._end(sequence, FinishReason.LENGTH)
        sequence.token_ids.append(token_id)
        sequence.num_losses = 0
        sequence.last_token_ns = now_ns
        if sequence.first_token_ns is None:
            sequence.first_token_ns = now_ns
        self._num_output_tokens += 1
        if token_id in sequence.stop_token_ids:
            return self._end(sequence, FinishReason.STOP, token_id)
        if sequence.num_output_tokens >= sequence.max_tokens:
            return self._end(sequence, FinishReason.LENGTH, token_id)
        self._settle(sequence)
        return TokenEvent(sequence.key, token_id)

    @staticmethod
    def _settle(sequence: Sequence) -> None:
        if sequence.num_in_flight == 0:
            sequence.move_to(Status.READY)

    def _end(
        self, sequence: Sequence, reason: FinishReason, token_id: int | None = None, *, error: str = ""
    ) -> TokenEvent:
        """A request has had its last token. Unless the batching keeps it, it leaves at once."""
        if sequence.status is not Status.FINISHED:
            sequence.move_to(Status.FINISHED)
        sequence.finish_reason = reason
        may_stay = reason in {FinishReason.STOP, FinishReason.LENGTH}
        if may_stay and self._batching.keeps(sequence):
            return TokenEvent(sequence.key, token_id)
        return self._leave(sequence, token_id, error)

    def _leave_released(self) -> list[TokenEvent]:
        return [self._leave(sequence) for sequence in self._batching.take_released()]

    def _leave(self, sequence: Sequence, token_id: int | None = None, error: str = "") -> TokenEvent:
        """The one way out of the pool: everything that a sequence has goes back."""
        self._queue.remove(sequence)
        self._num_finished += 1
        return TokenEvent(sequence.key, token_id, sequence.finish_reason, sequence, error)

    # --- for people and tests -----------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """True when the pool is empty and nothing is in flight."""
        return len(self._queue) == 0 and len(self._pipeline) == 0

    def stats(self) -> SchedulerStats:
        """Return a snapshot."""
        pool = self._pool
        return SchedulerStats(
            num_running=len(self._queue.started),
            num_waiting=len(self._queue.waiting),
            num_preempted=self._queue.num_preempted,
            num_in_flight_steps=len(self._pipeline),
            num_slots=pool.num_slots,
            num_used_slots=pool.num_used_slots,
            num_cached_slots=pool.num_cached * pool.block_size,
            num_steps=self._num_steps,
            num_output_tokens=self._num_output_tokens,
            num_finished=self._num_finished,
            num_preemptions=self._queue.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_prompt_tokens=self._num_cached_prompt_tokens,
            last_batch_size=self._last_batch_size,
            last_batch_tokens=self._last_batch_tokens,
        )

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` for the first broken invariant."""
        started, waiting = self._queue.started.values(), self._queue.waiting.values()
        self._pool.check(Counter(block for sequence in started for block in sequence.block_ids))
        assert not any(sequence.block_ids for sequence in waiting), "a waiting sequence owns blocks"
        assert all(len(set(s.block_ids)) == len(s.block_ids) for s in started), "a sequence owns a block twice"
        assert self._rows.num_taken == sum(s.row is not None for s in started), "a row is lost"
        arrivals = [sequence.arrival for sequence in self._queue.sequences()]
        assert arrivals == sorted(arrivals), "somebody overtook"
        in_flight = Counter(
            id(sequence)
            for step in self._pipeline.steps
            for sequence, incarnation in zip(step.sequences, step.incarnations, strict=True)
            if sequence.incarnation == incarnation
        )
        assert in_flight == {id(s): s.num_in_flight for s in started if s.num_in_flight}, "in flight, but where?"
        run_ahead = self._pipeline.depth if self._workers_append else 1
        assert all(count <= run_ahead for count in in_flight.values()), "in too many iterations in flight"
        assert all(
            (s.num_in_flight > 0) == (s.status is Status.RUNNING) for s in started if s.status is not Status.FINISHED
        )
