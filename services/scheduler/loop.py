"""The one task that owns the core: commands and results in, control messages and events out.

Everybody else puts commands into its inbox. An iteration's result is applied, the next iteration sent, and only then do
the sessions hear their tokens: the workers never wait for a client.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.scheduler.outbox import Outbox
from services.scheduler.tracing import record_sequence
from shared.errors import EngineLostError, InvalidRequestError, OrcaError, ProtocolError, UnavailableError
from shared.ids import Handle
from shared.log import get_logger
from shared.messages import Cancel, Ended, FinishReason, StepResult, Submit
from shared.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.scheduler.core.core import SchedulerCore
    from services.scheduler.core.events import SchedulerStats, TokenEvent
    from services.scheduler.epoch import EngineLink
    from services.scheduler.metrics import LoopMetrics
    from shared.clock import Clock
    from shared.messages import EngineInfo
    from shared.tracing import Tracer

__all__ = ["EngineLoop"]


@dataclass(frozen=True, slots=True)
class _FromSession:
    outbox: Outbox
    command: Submit | Cancel


@dataclass(frozen=True, slots=True)
class _SessionClosed:
    outbox: Outbox


@dataclass(frozen=True, slots=True)
class _EpochBegan:
    link: EngineLink


@dataclass(frozen=True, slots=True)
class _Retire:
    """The engine is about to lose a worker."""


@dataclass(frozen=True, slots=True)
class _EpochEnded:
    """The keeper saw it first."""


_Command = _FromSession | _SessionClosed | _EpochBegan | _Retire | _EpochEnded | StepResult


class EngineLoop:
    """The actor around the core. Its public methods only put commands into the inbox, or read."""

    def __init__(self, core: SchedulerCore, clock: Clock, metrics: LoopMetrics, tracer: Tracer | None = None) -> None:
        self._core = core
        self._clock = clock
        self._metrics = metrics
        self._tracer = tracer
        self._inbox: deque[_Command] = deque()
        self._wake = asyncio.Event()
        self._sessions: set[Outbox] = set()
        self._link: EngineLink | None = None
        self._on_lost: Callable[[EngineLostError], None] | None = None
        self._progress_ns = clock.now_ns()
        """When an iteration was last sent or came back."""
        self.has_results = False
        """Whether anything has come back in this epoch, or the last one."""
        self._draining = False
        self.is_retiring = False
        """Whether the engine takes no new requests until its next epoch."""
        self.num_broken_invariants = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # --- what others call ---------------------------------------------------------------------------------------------

    def open_session(self, outbox: Outbox) -> None:
        """Begin to tell a session what happens; it hears at once whether the engine is ready."""
        self._sessions.add(outbox)
        if self._link is not None and not self.is_retiring:
            outbox.engine_ready(self._link.info)

    def command(self, outbox: Outbox, command: Submit | Cancel) -> None:
        """Submit or cancel on behalf of a session."""
        self._put(_FromSession(outbox, command))

    def close_session(self, outbox: Outbox) -> None:
        """The gateway is gone: cancel all its requests."""
        self._put(_SessionClosed(outbox))

    def deliver(self, result: StepResult) -> None:
        """Take a result of the last stage."""
        self._put(result)

    def begin_epoch(self, link: EngineLink, on_lost: Callable[[EngineLostError], None]) -> None:
        """The engine is there. ``on_lost`` is called once where the loop itself finds it broken."""
        self._on_lost = on_lost
        self._put(_EpochBegan(link))

    def retire(self) -> None:
        """Have gateways send no new requests until the next epoch; those that are here go on."""
        self._put(_Retire())

    async def wait_idle(self) -> None:
        """Wait until the pool is empty."""
        await self._idle.wait()

    def end_epoch(self) -> None:
        """The engine is lost."""
        self._put(_EpochEnded())

    async def watch_progress(self, limit_s: float) -> None:
        """Raise ``EngineLostError`` when there is something to do and nothing is sent or comes back for so long.

        A worker whose computation hangs still gives signs of life, so nothing else would tell.
        """
        self._progress_ns = self._clock.now_ns()
        while True:
            left_s = limit_s - (self._clock.now_ns() - self._progress_ns) / 1e9
            if left_s > 0:
                await asyncio.sleep(left_s)
                continue
            stats = self._core.stats()
            if stats.num_in_flight_steps:
                raise EngineLostError(f"no iteration has come back for {limit_s:g} s: a worker hangs")
            if stats.num_running or stats.num_waiting:
                raise EngineLostError(
                    f"{stats.num_waiting} requests wait and {stats.num_running} have started, but no iteration "
                    f"has been sent for {limit_s:g} s: the scheduler is stuck"
                )
            self._progress_ns = self._clock.now_ns()  # nothing to do

    async def drain(self) -> None:
        """Refuse new requests from now on and wait until those in the pool have ended."""
        self._draining = True
        self.retire()
        await self.wait_idle()

    @property
    def info(self) -> EngineInfo | None:
        """What the engine is, while it is there."""
        return None if self._link is None else self._link.info

    def stats(self) -> SchedulerStats:
        """Snapshot of the core."""
        return self._core.stats()

    # --- the task -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Own the core until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            events: list[TokenEvent] = []
            while self._inbox:
                events += self._handle(self._inbox.popleft())
            self._send_plans()
            self._publish(events)
            if self._core.idle and not self._idle.is_set():
                self._check_invariants()
                self._idle.set()

    def _put(self, command: _Command) -> None:
        self._inbox.append(command)
        self._wake.set()

    def _handle(self, command: _Command) -> list[TokenEvent]:
        match command:
            case StepResult():
                return self._apply(command)
            case _FromSession(outbox, Submit() as submit):
                self._submit(outbox, submit)
            case _FromSession(outbox, Cancel() as cancel):
                return self._core.abort(outbox, cancel.handle)
            case _SessionClosed(outbox):
                self._sessions.discard(outbox)
                events = self._core.abort_session(outbox)
                num_cancelled = sum(event.finished is FinishReason.CANCELLED for event in events)
                get_logger().info("session_closed", gateway_id=outbox.gateway_id, num_cancelled=num_cancelled)
                return events
            case _EpochBegan(link):
                self._link = link
                self.has_results = False
                self.is_retiring = False
                events = self._core.engine_ready(link.epoch, link.capacity)
                for outbox in self._sessions:
                    outbox.engine_ready(link.info)
                return events
            case _Retire():
                self.is_retiring = True
                for outbox in self._sessions:
                    outbox.engine_lost()
            case _EpochEnded():
                return self._lose_engine()
        return []

    def _submit(self, outbox: Outbox, submit: Submit) -> None:
        self._metrics.submitted()
        try:
            if self._draining:
                raise UnavailableError("the scheduler is shutting down")
            self._core.add(outbox, submit, self._clock.now_ns())
            self._idle.clear()
        except OrcaError as refusal:
            if isinstance(refusal, InvalidRequestError):
                get_logger().info("request_refused", request_id=submit.request_id, message=str(refusal))
            self._metrics.refused(refusal.code)
            outbox.ended(Ended(submit.handle, FinishReason.ERROR, refusal.code, str(refusal)))

    def _apply(self, result: StepResult) -> list[TokenEvent]:
        if self._link is None or result.epoch != self._link.epoch:
            return []  # of an epoch that is over
        self.has_results = True
        self._progress_ns = now_ns = self._clock.now_ns()
        try:
            events = self._core.apply(result, now_ns)
        except ProtocolError as broken:
            return self._report_lost(EngineLostError(str(broken)))
        self._metrics.applied(now_ns)
        return events

    def _send_plans(self) -> None:
        """Fill the pipeline; filling it comes before everything else."""
        while self._link is not None:
            now_ns = self._clock.now_ns()
            plan = self._core.schedule(now_ns)
            if plan is None:
                return
            self._progress_ns = now_ns
            self._link.send(plan)
            self._metrics.sent(now_ns, len(plan.rows), sum(plan.num_tokens))

    def _report_lost(self, lost: EngineLostError) -> list[TokenEvent]:
        events = self._lose_engine()
        if self._on_lost is not None:
            self._on_lost(lost)
            self._on_lost = None
        return events

    def _lose_engine(self) -> list[TokenEvent]:
        if self._link is None:
            return []
        self._link = None
        self._metrics.engine_lost()
        for outbox in self._sessions:
            outbox.engine_lost()
        return self._core.engine_lost()

    def _check_invariants(self) -> None:
        """Always on, whenever the pool is empty: a leak is told, counted, and mended by a fresh epoch."""
        try:
            self._core.check_invariants()
        except AssertionError as broken:
            self.num_broken_invariants += 1
            get_logger().error("invariant_broken", message=str(broken))
            self._report_lost(EngineLostError(f"an invariant of the scheduler is broken: {broken}"))

    def _publish(self, events: list[TokenEvent]) -> None:
        for event in events:
            outbox, handle = event.key
            assert isinstance(outbox, Outbox)
            if event.prompt_logprobs is not None:
                outbox.prompt_scored(Handle(handle), event.prompt_logprobs)
            if event.token_id is not None:
                outbox.token(Handle(handle), event.token_id, event.logprobs)
            if event.finished is not None:
                assert event.sequence is not None
                self._metrics.ended(event.sequence, event.finished)
                if self._tracer is not None:
                    record_sequence(self._tracer, event.sequence, self._clock.now_ns(), event.error)
                outbox.ended(_ended(event))


def _ended(event: TokenEvent) -> Ended:
    sequence = event.sequence
    assert sequence is not None
    assert event.finished is not None
    first, last = sequence.first_token_ns, sequence.last_token_ns
    started = sequence.scheduled_ns
    return Ended(
        handle=Handle(event.key[1]),
        reason=event.finished,
        error_code=StatusCode.INTERNAL if event.error else StatusCode.OK,
        error_message=event.error,
        queue_ns=0 if started is None else started - sequence.arrived_ns,
        prefill_ns=0 if first is None or started is None else first - started,
        decode_ns=0 if first is None or last is None else last - first,
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
    )
