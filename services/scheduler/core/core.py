"""ORCA's scheduler (OSDI '22, Algorithm 1): iteration-level, first come first served, deadlock-free by reservation.

One iteration: of the sequences that are not in an iteration, in order of arrival, up to ``max_batch_size`` are
selected; one that is selected for the first time gets its K/V from the policy, and where it cannot, selection stops
there, so that nobody overtakes. Iterations go on being selected, without waiting for results, while fewer than
``num_stages`` are in flight. Where nothing can be selected the caller waits for what is outstanding.

Invariants (``check_invariants``): every sequence that has started arrived before every sequence that waits; a block
belongs to one sequence or is free; a sequence is in one iteration in flight at most; whoever ended owns nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.pipeline import Pipeline
from services.scheduler.core.plan import PlanBuilder, RowTable
from services.scheduler.core.policy import KvPolicy, ReservePolicy
from services.scheduler.core.sequence import RequestKey, Sequence, Status
from shared.errors import InvalidRequestError, OverloadedError, ProtocolError, UnavailableError
from shared.messages import FinishReason, StepPlan, StepResult, Submit

if TYPE_CHECKING:
    from shared.ids import Epoch

__all__ = ["Capacity", "SchedulerCore", "SchedulerStats", "TokenEvent"]


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the workers can hold and do; the smallest of all ranks where they differ."""

    num_blocks: int
    block_size: int
    num_stages: int
    max_model_len: int
    vocab_size: int

    @property
    def num_slots(self) -> int:
        """K/V slots in all (``n_slots`` of Algorithm 1)."""
        return self.num_blocks * self.block_size


class TokenEvent(NamedTuple):
    """What happened to one request: a token, its end, or both at once."""

    key: RequestKey
    token_id: int | None
    finished: FinishReason | None = None
    sequence: Sequence | None = None
    """With ``finished``: the sequence as it ended, for timings."""
    error: str = ""


class SchedulerStats(NamedTuple):
    """A snapshot of the core."""

    num_running: int
    """Started and not ended: in an iteration or between two."""
    num_waiting: int
    num_in_flight_steps: int
    num_slots: int
    num_reserved_slots: int
    num_steps: int
    num_output_tokens: int
    num_finished: int
    last_batch_size: int
    last_batch_tokens: int


class SchedulerCore:
    """The request pool and every decision about it. Not thread-safe: one task owns it."""

    def __init__(self, *, max_batch_size: int, max_waiting: int) -> None:
        self._max_batch_size = max_batch_size
        self._max_waiting = max_waiting
        self._sequences: dict[RequestKey, Sequence] = {}
        # Both in order of arrival; everything in _started arrived before everything in _waiting.
        self._started: dict[RequestKey, Sequence] = {}
        self._waiting: OrderedDict[RequestKey, Sequence] = OrderedDict()
        self._next_arrival = 0
        self._num_steps = 0
        self._num_output_tokens = 0
        self._num_finished = 0
        self._last_batch_size = 0
        self._last_batch_tokens = 0
        self._capacity: Capacity | None = None
        self._epoch: Epoch | None = None
        self._set_up_engine(Capacity(1, 1, 1, 1, 1))

    def _set_up_engine(self, capacity: Capacity) -> None:
        self._pool = BlockPool(capacity.num_blocks, capacity.block_size)
        self._policy: KvPolicy = ReservePolicy(self._pool)
        self._pipeline = Pipeline(capacity.num_stages)
        self._rows = RowTable()

    # --- the engine comes and goes ------------------------------------------------------------------------------------

    def engine_ready(self, epoch: Epoch, capacity: Capacity) -> list[TokenEvent]:
        """The workers have joined an epoch with empty K/V. Requests that cannot fit any more end with an error."""
        if self._epoch is not None:
            raise AssertionError("the engine is ready already")
        self._epoch = epoch
        self._capacity = capacity
        self._set_up_engine(capacity)
        events = []
        for sequence in list(self._waiting.values()):
            refusal = self._refusal(sequence.num_prompt_tokens, sequence.max_tokens)
            if refusal is not None:
                events.append(self._end(sequence, None, FinishReason.ERROR, refusal))
        return events

    def engine_lost(self) -> None:
        """The epoch is over: every unfinished request goes back to waiting, in its old place, to be computed again."""
        self._epoch = None
        for sequence in reversed(list(self._started.values())):
            sequence.move_to(Status.WAITING)
            sequence.forget_engine()
            self._waiting[sequence.key] = sequence
            self._waiting.move_to_end(sequence.key, last=False)
        self._started.clear()
        if self._capacity is not None:
            self._set_up_engine(self._capacity)

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
        if key in self._sequences:
            raise InvalidRequestError(f"request handle {request.handle} is in use in this session")
        num_prompt, num_output = len(request.prompt_token_ids), len(request.output_token_ids)
        if num_prompt == 0:
            raise InvalidRequestError("the prompt has no tokens; give at least one")
        if not num_output < request.max_tokens:
            raise InvalidRequestError(
                f"max_tokens is {request.max_tokens}; it must be at least 1 more than the output so far"
            )
        refusal = self._refusal(num_prompt, request.max_tokens)
        if refusal is not None:
            raise InvalidRequestError(refusal)
        largest = max(max(ids) for ids in (request.prompt_token_ids, request.output_token_ids) if ids)
        if largest >= capacity.vocab_size:
            raise InvalidRequestError(f"token id {largest} is outside the vocabulary (0 to {capacity.vocab_size - 1})")
        if len(self._waiting) >= self._max_waiting:
            raise OverloadedError(f"{len(self._waiting)} requests wait already, which is the limit; try again later")
        sequence = Sequence(
            key=key,
            request_id=request.request_id,
            arrival=self._next_arrival,
            token_ids=request.prompt_token_ids + request.output_token_ids,
            num_prompt_tokens=num_prompt,
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            stop_token_ids=request.stop_token_ids,
            arrived_ns=now_ns,
        )
        self._next_arrival += 1
        self._sequences[key] = sequence
        self._waiting[key] = sequence

    def _refusal(self, num_prompt: int, max_tokens: int) -> str | None:
        """Why a request of this size can never be served, or None."""
        capacity = self._capacity
        assert capacity is not None
        total = num_prompt + max_tokens
        asked = f"prompt ({num_prompt} tokens) and max_tokens ({max_tokens}) add up to {total}"
        if total > capacity.max_model_len:
            return (
                f"{asked}, over the context of {capacity.max_model_len} tokens; shorten the prompt or lower max_tokens"
            )
        if not self._policy.fits(total):
            return (
                f"{asked}, over the {capacity.num_slots} K/V slots of the engine; lower max_tokens or raise --kv-memory"
            )
        return None

    def abort(self, session: object, handle: int) -> TokenEvent | None:
        """Drop a request and free all it has at once; None where there is no such request.

        Safe in mid-flight: each worker runs control messages in order, so what the iteration under way writes to the
        freed blocks is written before a later iteration may use them. Its result is dropped in ``apply``.
        """
        sequence = self._sequences.get((session, handle))
        return None if sequence is None else self._end(sequence, None, FinishReason.CANCELLED)

    def abort_session(self, session: object) -> int:
        """Drop all requests of a session and return how many there were."""
        gone = [sequence for sequence in self._sequences.values() if sequence.key[0] == session]
        for sequence in gone:
            self._end(sequence, None, FinishReason.CANCELLED)
        return len(gone)

    # --- iterations ---------------------------------------------------------------------------------------------------

    def schedule(self, now_ns: int) -> StepPlan | None:
        """Select the next iteration, or None: the pipeline is full, nothing can be selected, or there is no engine."""
        if self._epoch is None or self._pipeline.full:
            return None
        batch = self._select()
        if not batch:
            return None
        builder = PlanBuilder(self._rows)
        for sequence in batch:
            builder.add(sequence, len(sequence.token_ids) - sequence.num_computed_tokens)
            sequence.move_to(Status.RUNNING)
            sequence.num_iterations += 1
            if sequence.scheduled_ns is None:
                sequence.scheduled_ns = now_ns
        self._num_steps += 1
        self._last_batch_size = len(batch)
        self._last_batch_tokens = builder.total_tokens
        return builder.build(self._epoch, self._pipeline.send(batch, builder.samples))

    def _select(self) -> list[Sequence]:
        """Algorithm 1, ``Select``: lines 17 to 28."""
        batch: list[Sequence] = []
        for sequence in self._started.values():
            if len(batch) == self._max_batch_size:
                return batch
            if sequence.status is Status.READY:
                batch.append(sequence)
        while self._waiting and len(batch) < self._max_batch_size:
            sequence = next(iter(self._waiting.values()))
            if not self._policy.admit(sequence):
                break  # stop, not skip: nobody overtakes
            del self._waiting[sequence.key]
            self._started[sequence.key] = sequence
            batch.append(sequence)
        return batch

    def apply(self, result: StepResult, now_ns: int) -> list[TokenEvent]:
        """Take the oldest iteration's tokens; returns what its requests should hear, in batch order.

        Raises ``ProtocolError`` for a result of another epoch, out of order or of another size.
        """
        if result.epoch != self._epoch:
            raise ProtocolError(f"result of epoch {result.epoch}, expected was {self._epoch}")
        step = self._pipeline.collect(result.step_id)
        if len(result.token_ids) != sum(step.samples):
            raise ProtocolError(
                f"step {result.step_id}: {len(result.token_ids)} tokens for {sum(step.samples)} sequences"
            )
        events: list[TokenEvent] = []
        tokens = iter(enumerate(result.token_ids))
        for sequence, samples in zip(step.sequences, step.samples, strict=True):
            index, token_id = next(tokens) if samples else (None, None)
            if sequence.status is not Status.RUNNING:
                continue  # cancelled meanwhile
            if index is None or token_id is None:
                sequence.move_to(Status.READY)
            elif index in result.invalid:
                message = "the model's logits are not finite numbers for this request"
                events.append(self._end(sequence, None, FinishReason.ERROR, message))
            else:
                events.append(self._append(sequence, token_id, now_ns))
        return events

    def _append(self, sequence: Sequence, token_id: int, now_ns: int) -> TokenEvent:
        sequence.token_ids.append(token_id)
        sequence.last_token_ns = now_ns
        if sequence.first_token_ns is None:
            sequence.first_token_ns = now_ns
        self._num_output_tokens += 1
        if token_id in sequence.stop_token_ids:
            return self._end(sequence, token_id, FinishReason.STOP)
        if sequence.num_output_tokens >= sequence.max_tokens:
            return self._end(sequence, token_id, FinishReason.LENGTH)
        sequence.move_to(Status.READY)
        return TokenEvent(sequence.key, token_id)

    def _end(self, sequence: Sequence, token_id: int | None, reason: FinishReason, error: str = "") -> TokenEvent:
        """The one way out of the pool: everything that a sequence has goes back."""
        sequence.move_to(Status.FINISHED)
        del self._sequences[sequence.key]
        self._started.pop(sequence.key, None)
        self._waiting.pop(sequence.key, None)
        self._policy.release(sequence)
        if sequence.row is not None:
            self._rows.release(sequence.row)
        sequence.forget_engine()
        self._num_finished += 1
        return TokenEvent(sequence.key, token_id, reason, sequence, error)

    # --- for people and tests -----------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """True when the pool is empty and nothing is in flight."""
        return not self._sequences and len(self._pipeline) == 0

    def stats(self) -> SchedulerStats:
        """Return a snapshot."""
        return SchedulerStats(
            num_running=len(self._started),
            num_waiting=len(self._waiting),
            num_in_flight_steps=len(self._pipeline),
            num_slots=self._pool.num_slots,
            num_reserved_slots=self._pool.num_used_slots,
            num_steps=self._num_steps,
            num_output_tokens=self._num_output_tokens,
            num_finished=self._num_finished,
            last_batch_size=self._last_batch_size,
            last_batch_tokens=self._last_batch_tokens,
        )

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` for the first broken invariant."""
        owned = [block for sequence in self._started.values() for block in sequence.block_ids]
        assert len(owned) == len(set(owned)), "a block has two owners"
        assert not self._pool.free_ids & set(owned), "a block is free and owned"
        assert self._pool.num_free + len(owned) == self._pool.num_blocks, "a block is lost"
        assert not any(sequence.block_ids for sequence in self._waiting.values()), "a waiting sequence owns blocks"
        assert self._rows.num_taken == len(self._started), "a row is lost"
        arrivals = [sequence.arrival for sequence in (*self._started.values(), *self._waiting.values())]
        assert arrivals == sorted(arrivals), "somebody overtook"
        assert len(arrivals) == len(self._sequences), "a request is lost"
        in_flight = [s for step in self._pipeline.steps for s in step.sequences if s.status is Status.RUNNING]
        assert len(in_flight) == len({id(s) for s in in_flight}), "a sequence is in two iterations in flight"
        running = [s for s in self._started.values() if s.status is Status.RUNNING]
        assert {id(s) for s in running} == {id(s) for s in in_flight}, "a running sequence is in no iteration"
