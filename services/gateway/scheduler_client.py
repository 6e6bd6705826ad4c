"""The gateway's one session with the scheduler: requests go up, events come down, and a broken session is opened again.

The requests in service are in the `StreamTable`, not in the session: when a new session reports a ready engine, every
unfinished one is submitted again with the tokens it has, so that clients see a pause only. Between sessions nothing is
queued: what a scheduler must know follows from the table.

A scheduler that hangs keeps its connections open, and so does a host that vanished: beside the session it is asked for
the engine's state again and again, and one that does not answer in time has lost its session. Why the engine is not
ready comes with the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING

import grpc
from grpc import aio

from shared.codec.engine import engine_status_from_pb
from shared.codec.mesh_view import engine_snapshot_from_pb
from shared.codec.session import session_events_from_pb, session_request_to_pb
from shared.config import DEFAULT_HEARTBEAT_S
from shared.errors import OverloadedError, ProtocolError
from shared.log import get_logger
from shared.messages import Cancel, Ended, EngineStatus, FinishReason, Hello, Submit, token_ids
from shared.pb import scheduler_pb2, scheduler_pb2_grpc
from shared.rpc import connect, error_from_rpc
from shared.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
    from typing import NoReturn

    from services.gateway.jobs import GenerateJob
    from services.gateway.readiness import Readiness
    from services.gateway.streams import News, OutputStream, StreamTable
    from shared.mesh_view import EngineSnapshot
    from shared.messages import EngineInfo, SessionEvents
    from shared.tls import TlsCredentials

    _Call = aio.StreamStreamCall[scheduler_pb2.SessionRequest, scheduler_pb2.SessionEvents]

__all__ = ["SchedulerClient", "back_off"]

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_STATUS_TIMEOUT_S = 2.0
_CANCEL_TIMEOUT_S = 1.0


async def back_off(attempt: int) -> None:
    """Pause before reconnecting: twice as long each time, up to 2 s, and at random so that gateways do not march."""
    longest_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(attempt, 16))
    await asyncio.sleep(secrets.SystemRandom().uniform(longest_s / 2, longest_s))


class SchedulerClient:
    """A client of the scheduler at ``address`` on behalf of all requests of this gateway."""

    def __init__(
        self,
        address: str,
        streams: StreamTable,
        readiness: Readiness,
        *,
        max_queued: int,
        heartbeat_s: float = DEFAULT_HEARTBEAT_S,
        tls: TlsCredentials | None = None,
        back_off: Callable[[int], Awaitable[None]] = back_off,
    ) -> None:
        """``max_queued`` bounds what a scheduler that does not read may leave waiting here.

        ``heartbeat_s``: how often it is asked for a sign of life, and how long it may take to give it.
        """
        self._address = address
        self._channel = connect(address, tls)
        self._stub = scheduler_pb2_grpc.SchedulerStub(self._channel)
        self._streams = streams
        self._readiness = readiness
        self._max_queued = max_queued
        self._heartbeat_s = heartbeat_s
        self._ask_now = asyncio.Event()
        self._back_off = back_off
        self._outgoing: asyncio.Queue[Submit | Cancel] | None = None
        """None while no session knows the requests in service."""
        self._model: str | None = None
        self._connected: bool | None = None

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    def open(self, jobs: Sequence[GenerateJob], news: News) -> list[OutputStream]:
        """Submit the sequences of a request, which wait for the next session where there is none.

        ``news`` is told of each by its index in ``jobs``. One that has nothing to compute has ended already.

        Raises:
            OverloadedError: the scheduler does not keep up with what it is sent.
        """
        if self._outgoing is not None and self._outgoing.qsize() + len(jobs) > self._max_queued:
            raise OverloadedError("the scheduler does not keep up with new requests; try again later")
        streams = [self._streams.open(job, news, index) for index, job in enumerate(jobs)]
        for stream in streams:
            if stream.job.needs_engine:
                self._submit(stream)
            else:
                stream.end(Ended(stream.handle, FinishReason.LENGTH))
        return streams

    def cancel(self, stream: OutputStream) -> None:
        """Have the scheduler end a sequence whose output is complete. Its end tells where the time went.

        A scheduler that does not answer is not waited for.
        """
        stream.cancelled = True
        if self._outgoing is None:
            stream.end_alone()
            return
        self._outgoing.put_nowait(Cancel(stream.handle))
        asyncio.get_running_loop().call_later(_CANCEL_TIMEOUT_S, stream.end_alone)

    def close_stream(self, stream: OutputStream) -> None:
        """Forget a sequence, and cancel it where it has not ended; closing it again does nothing."""
        if not self._streams.close(stream):
            return
        if stream.ended is None and not stream.cancelled and self._outgoing is not None:
            self._outgoing.put_nowait(Cancel(stream.handle))

    async def engine_status(self) -> EngineStatus:
        """Return the engine's state; a scheduler that does not answer is a state, too."""
        try:
            response = await self._stub.GetEngineStatus(
                scheduler_pb2.GetEngineStatusRequest(), timeout=_STATUS_TIMEOUT_S
            )
        except aio.AioRpcError as failure:
            reason = f"the scheduler at {self._address} does not answer ({_reason(failure)})"
            return EngineStatus(ready=False, reason=reason, epoch=0, info=None, workers=())
        return engine_status_from_pb(response.status)

    async def watch(self, interval_s: float) -> AsyncGenerator[EngineSnapshot, None]:
        """Give a snapshot of the engine every ``interval_s`` seconds until the scheduler leaves.

        Raises:
            UnavailableError: it cannot be reached, or not any more.
            OverloadedError: too many watch it.
        """
        call = self._stub.WatchEngine(scheduler_pb2.WatchEngineRequest(interval_ms=round(interval_s * 1e3)))
        try:
            async for message in call:
                yield engine_snapshot_from_pb(message)
        except aio.AioRpcError as failure:
            raise error_from_rpc(failure, f"the scheduler at {self._address}") from failure
        finally:
            call.cancel()

    async def run(self, gateway_id: str) -> NoReturn:
        """Keep a session open, for ever."""
        attempt = 0
        while True:
            reason = await self._run_session(gateway_id)
            if self._outgoing is not None:
                attempt = 0
            self._session_lost(reason)
            await self._back_off(attempt)
            attempt += 1

    async def _run_session(self, gateway_id: str) -> str:
        """Serve one session until it breaks; return why it did."""
        outgoing: asyncio.Queue[Submit | Cancel] = asyncio.Queue()
        call = self._stub.Session()
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._read(call, outgoing))
                heartbeat = tasks.create_task(self._watch_heartbeat())
                writer = tasks.create_task(self._write(call, gateway_id, outgoing))
                await asyncio.wait({reader, heartbeat}, return_when=asyncio.FIRST_COMPLETED)
                reason = heartbeat.result() if heartbeat.done() else reader.result()
                for task in (reader, heartbeat, writer):
                    task.cancel()
        finally:
            call.cancel()
        return reason

    async def _write(self, call: _Call, gateway_id: str, outgoing: asyncio.Queue[Submit | Cancel]) -> None:
        message: Hello | Submit | Cancel = Hello(gateway_id)
        try:
            await call.write(session_request_to_pb(message))
            while True:
                message = await outgoing.get()
                await call.write(session_request_to_pb(message))
        except (aio.AioRpcError, asyncio.InvalidStateError):
            return  # the session is over; the reader learns why

    async def _read(self, call: _Call, outgoing: asyncio.Queue[Submit | Cancel]) -> str:
        try:
            async for message in call:
                self._connected_now()
                self._on_events(session_events_from_pb(message), outgoing)
        except aio.AioRpcError as failure:
            return _reason(failure)
        except ProtocolError as error:
            return str(error)
        return "it ended the session"

    async def _watch_heartbeat(self) -> str:
        """Ask for the engine's state again and again; return what is wrong as soon as no answer comes in time."""
        while True:
            self._ask_now.clear()
            try:
                response = await self._stub.GetEngineStatus(
                    scheduler_pb2.GetEngineStatusRequest(), timeout=self._heartbeat_s
                )
            except aio.AioRpcError as failure:
                if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    return f"it has not answered for {self._heartbeat_s:g} s"
                # Where nobody is there, the session itself breaks.
            else:
                self._connected_now()
                status = engine_status_from_pb(response.status)
                if not status.ready:
                    self._readiness.engine_missing(status.reason)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s):
                    await self._ask_now.wait()

    def _on_events(self, events: SessionEvents, outgoing: asyncio.Queue[Submit | Cancel]) -> None:
        self._streams.deliver(events)
        if events.engine_lost:
            self._readiness.engine_lost()
            self._ask_now.set()
        if events.engine_ready is not None:
            self._engine_ready(events.engine_ready, outgoing)

    def _engine_ready(self, engine: EngineInfo, outgoing: asyncio.Queue[Submit | Cancel]) -> None:
        self._model = engine.model
        if self._outgoing is None:
            self._outgoing = outgoing
            self._submit_again()
        self._readiness.engine_ready(engine)

    def _submit_again(self) -> None:
        num_resubmitted = 0
        for stream in self._streams.unfinished():
            ended = stream.complete()
            if ended is not None:  # its end was lost with the session
                stream.end(ended)
                continue
            stream.resubmitted()
            self._submit(stream)
            num_resubmitted += stream.ended is None
        if num_resubmitted:
            get_logger().info("requests_resubmitted", num_requests=num_resubmitted)

    def _submit(self, stream: OutputStream) -> None:
        if self._outgoing is None:
            return
        job = stream.job
        if job.model != self._model:
            message = f"the engine now serves {self._model!r}, no longer {job.model!r}; send the request again"
            stream.end(Ended(stream.handle, FinishReason.ERROR, StatusCode.UNAVAILABLE, message))
            return
        self._outgoing.put_nowait(
            Submit(
                handle=stream.handle,
                request_id=job.request_id,
                prompt_token_ids=job.prompt_token_ids,
                max_tokens=job.max_tokens,
                sampling=job.sampling,
                stop_token_ids=job.stop_token_ids,
                output_token_ids=token_ids(stream.output_token_ids),
                num_prompt_logprobs=None if stream.is_scored else job.num_prompt_logprobs,
                grammar=job.grammar,
                traceparent=job.traceparent,
            )
        )

    def _connected_now(self) -> None:
        if self._connected is not True:
            self._connected = True
            get_logger().info("scheduler_connected", address=self._address)

    def _session_lost(self, reason: str) -> None:
        self._outgoing = None
        for stream in self._streams.unfinished():
            if stream.cancelled:
                stream.end_alone()
        self._readiness.session_lost(reason)
        if self._connected is not False:
            self._connected = False
            get_logger().warning("scheduler_lost", address=self._address, reason=reason)


def _reason(failure: aio.AioRpcError) -> str:
    return failure.details() or failure.code().name
