"""Sends the requests of a trace and keeps time: open loop, closed loop, or open with a limit.

In a closed loop (no arrivals) a request starts when there is room for it, and its latencies count from there. In an
open loop it starts when it arrives, whether or not it can be sent: a server that is behind makes nobody wait unseen.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from bench.load.records import Outcome, Reception, RequestRecord
from shared.clock import SystemClock
from shared.errors import OrcaError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.load.endpoint import LoadClient
    from bench.load.traces import TraceRequest
    from shared.clock import Clock

__all__ = ["run_load"]


async def run_load(
    client: LoadClient,
    trace: Sequence[TraceRequest],
    *,
    arrivals_s: Sequence[float] | None = None,
    max_concurrency: int | None = None,
    timeout_s: float | None = None,
    on_end: Callable[[RequestRecord], None] | None = None,
    stop: asyncio.Event | None = None,
    clock: Clock | None = None,
) -> list[RequestRecord]:
    """Send a trace and return what came of each request, in the trace's order.

    Failures are records, too; nothing that an endpoint does is raised.

    Args:
        client: what ``open_client`` gives.
        trace: requests in the order of their arrival.
        arrivals_s: when each arrives, in seconds after the start (``poisson_arrivals``); None: a closed loop.
        max_concurrency: most requests in flight; None: no limit, so that a closed loop sends everything at once.
        timeout_s: a request that takes longer from its sending has failed.
        on_end: is told of each request at its end.
        stop: once it is set, nothing is sent any more and what runs is cancelled; requests that had not started have
            no record.
        clock: the one that the client reads as well.
    """
    run = _Run(client, max_concurrency, timeout_s, on_end, clock or SystemClock())
    loop = asyncio.get_running_loop()
    begin_s, begin_ns = loop.time(), run.clock.now_ns()
    tasks = []
    for index, request in enumerate(trace):
        arrival_s = None if arrivals_s is None else arrivals_s[index]
        due = None if arrival_s is None else (begin_s + arrival_s, begin_ns + round(arrival_s * 1e9))
        tasks.append(asyncio.create_task(run.one(index, request, due)))
    all_ended = asyncio.create_task(_ended(tasks))
    stopped = asyncio.create_task((stop or asyncio.Event()).wait())
    try:
        await asyncio.wait({all_ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.wait({stopped, all_ended})
    records = [task.result() for task in tasks if not task.cancelled()]
    return [record for record in records if record is not None]


class _Run:
    """What all requests of a run share."""

    def __init__(
        self,
        client: LoadClient,
        max_concurrency: int | None,
        timeout_s: float | None,
        on_end: Callable[[RequestRecord], None] | None,
        clock: Clock,
    ) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._on_end = on_end
        self.clock = clock
        limited = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else None
        self._room: contextlib.AbstractAsyncContextManager[None] = limited or contextlib.nullcontext()

    async def one(self, index: int, request: TraceRequest, due: tuple[float, int] | None) -> RequestRecord | None:
        """Send a request when it is due, at once where None is given; ``due`` is by the loop's clock and by ours (ns).

        None is returned where the run was stopped before the request had started.
        """
        started_ns = None
        if due is not None:
            await _reached(due[0])
            started_ns = min(due[1], self.clock.now_ns())
        sent_ns = None
        reception = Reception()
        outcome, error = Outcome.OK, ""
        try:
            async with self._room, asyncio.timeout(self._timeout_s):
                sent_ns = self.clock.now_ns()
                await self._client.send(request, reception)
        except OrcaError as failure:
            outcome, error = Outcome.FAILED, str(failure)
        except TimeoutError:
            outcome, error = Outcome.FAILED, f"it took longer than {self._timeout_s:g} s"
        except asyncio.CancelledError:
            if started_ns is None and sent_ns is None:
                raise
            outcome = Outcome.CANCELLED
        now_ns = self.clock.now_ns()
        sent_ns = now_ns if sent_ns is None else sent_ns
        record = RequestRecord(
            index=index,
            outcome=outcome,
            started_ns=sent_ns if started_ns is None else started_ns,
            sent_ns=sent_ns,
            ended_ns=reception.ended_ns if outcome is Outcome.OK and reception.ended_ns is not None else now_ns,
            event_times_ns=tuple(reception.event_times_ns),
            num_prompt_tokens=reception.num_prompt_tokens,
            num_output_tokens=reception.num_output_tokens,
            max_tokens=request.max_tokens,
            error=error,
        )
        if self._on_end is not None:
            self._on_end(record)
        return record


async def _ended(tasks: Sequence[asyncio.Task[RequestRecord | None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


async def _reached(time_s: float) -> None:
    """Wait until the loop's clock shows ``time_s``."""
    loop = asyncio.get_running_loop()
    due = loop.create_future()
    timer = loop.call_at(time_s, due.set_result, None)
    try:
        await due
    finally:
        timer.cancel()
