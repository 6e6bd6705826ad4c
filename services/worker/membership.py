"""This worker's part in one epoch, from ``Joined`` to its end: what may be asked of it, what comes out, why it ended.

Lives on the event loop. Whatever breaks anywhere, a peer, a plan, the compute, ends the whole membership with one
error, which all of its streams then carry; there is no way back but to join the next epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from services.worker.executor import Executor
from services.worker.threads import start_thread
from services.worker.timeline import Timeline
from shared.errors import EngineLostError, OrcaError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from services.worker.joining import Assembly
    from services.worker.observer import StepObserver
    from services.worker.outcome import Outcome
    from shared.clock import Clock
    from shared.codec.step_columns import StepColumns
    from shared.messages import JoinRequest, StepResult

__all__ = ["MAX_PENDING_STEPS", "Membership"]

MAX_PENDING_STEPS = 256
"""Steps that are queued, or whose results nobody has taken; beyond that the control stream is read no further."""


class Membership:
    """One epoch of one rank. Created on the event loop, it starts the compute thread at once."""

    def __init__(
        self, request: JoinRequest, assembly: Assembly, clock: Clock, observers: Sequence[StepObserver] = ()
    ) -> None:
        self.request = request
        self._observers = observers
        self.timeline = Timeline()
        self.over: asyncio.Future[OrcaError] = asyncio.get_running_loop().create_future()
        """Set to the reason when the epoch is over."""
        self._loop = asyncio.get_running_loop()
        self._executor = Executor(request, assembly, clock=clock, on_step=self._from_compute_thread)
        self._has_results = request.stage == request.num_stages - 1 and request.tp_rank == 0
        self._next_step_id = 0
        self._room = asyncio.Semaphore(MAX_PENDING_STEPS)
        self._num_computing = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._results: asyncio.Queue[StepResult | OrcaError] = asyncio.Queue()
        self._is_executing = False
        self._is_read = False
        self._thread = start_thread(self._executor.run, name=f"compute-{request.epoch}")
        self._thread.add_done_callback(self._on_thread_end)

    @contextlib.contextmanager
    def executing(self) -> Iterator[None]:
        """Hold the control stream. Raises ``ProtocolError`` while another one holds it."""
        self._check_alive()
        if self._is_executing:
            raise ProtocolError("a control stream is open already; a worker takes one at a time")
        self._is_executing = True
        try:
            yield
        finally:
            self._is_executing = False

    def admit(self, epoch: int, step_id: int) -> None:
        """Check that a control message is the next one of this epoch. Raises ``ProtocolError``."""
        self._check_alive()
        if epoch != self.request.epoch:
            raise ProtocolError(f"step {step_id} is of epoch {epoch}; this worker is in epoch {self.request.epoch}")
        if step_id != self._next_step_id:
            raise ProtocolError(f"step {step_id} came where step {self._next_step_id} was due: a gap is fatal")
        self._next_step_id += 1

    async def submit(self, plan: StepColumns, received_ns: int) -> None:
        """Put an admitted plan before the compute thread, waiting while too many are pending."""
        await self._room.acquire()
        self._num_computing += 1
        self._idle.clear()
        for observer in self._observers:
            observer.step_submitted()
        self._executor.submit(plan, received_ns)

    async def drained(self) -> None:
        """Wait until all steps that were submitted have been computed."""
        await self._idle.wait()

    async def results(self) -> AsyncGenerator[StepResult]:
        """Yield results in order of steps. Raises the reason when the epoch is over.

        Raises ``ProtocolError`` on a rank that has none, and while somebody else reads.
        """
        self._check_alive()
        if not self._has_results:
            raise ProtocolError("results come from rank 0 of the last stage; this worker has none")
        if self._is_read:
            raise ProtocolError("somebody reads the results already; each is delivered once")
        self._is_read = True
        try:
            while not isinstance(result := await self._results.get(), OrcaError):
                self._room.release()
                yield result
            raise result
        finally:
            self._is_read = False
            # A result may have been lost with its reader.
            self.end(EngineLostError("the stream of results was closed"))

    def end(self, reason: OrcaError) -> None:
        """End the epoch; only the first reason counts."""
        if not self.over.done():
            self.over.set_result(reason)
            self._results.put_nowait(reason)
            self._executor.stop()

    async def closed(self) -> None:
        """Wait until the compute thread has left and its memory and connections are given back."""
        if not self._thread.done():
            self._executor.abort()
            await asyncio.wait({self._thread})

    def _from_compute_thread(self, outcome: Outcome) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process leaves
            self._loop.call_soon_threadsafe(self._on_step, outcome)

    def _on_step(self, outcome: Outcome) -> None:
        timing = outcome.timing()
        self.timeline.add(timing)
        for observer in self._observers:
            observer.step_ended(outcome, timing)
        self._num_computing -= 1
        if not self._num_computing:
            self._idle.set()
        if self._has_results:
            self._results.put_nowait(outcome.result())
        else:
            self._room.release()

    def _on_thread_end(self, thread: asyncio.Future[OrcaError | None]) -> None:
        if thread.cancelled():
            return
        crash = thread.exception()
        failure = thread.result() if crash is None else EngineLostError(f"the compute thread failed: {crash}")
        if failure is not None:
            self.end(failure)

    def _check_alive(self) -> None:
        if self.over.done():
            raise ProtocolError(f"epoch {self.request.epoch} is over: {self.over.result()}")
