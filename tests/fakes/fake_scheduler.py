"""A scripted scheduler over real gRPC: records what gateways send, says what a test tells it to."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

from shared.codec.engine import engine_status_to_pb
from shared.codec.mesh_view import engine_snapshot_to_pb
from shared.codec.session import session_events_to_pb, session_request_from_pb
from shared.messages import (
    Cancel,
    Ended,
    EngineInfo,
    EngineStatus,
    FinishReason,
    Hello,
    PromptLogprobs,
    SessionEvents,
    Submit,
)
from shared.pb import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from shared.rpc import RpcServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from shared.ids import Handle
    from shared.mesh_view import EngineSnapshot
    from shared.messages import TokenLogprobs

__all__ = ["ENGINE", "FakeScheduler", "FakeSession"]

ENGINE = EngineInfo(
    model="synthetic:",
    max_model_len=64,
    vocab_size=300,
    num_slots=48,
    block_size=16,
    num_stages=2,
    tp_size=1,
    dtype="float32",
)
"""A small engine whose model has the byte tokenizer."""


class FakeSession:
    """One gateway's session, as the scheduler sees it."""

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.outgoing: asyncio.Queue[SessionEvents | None] = asyncio.Queue()
        self.closed = asyncio.Event()
        """Set once the stream has ended, from whichever side."""
        self.submits: asyncio.Queue[Submit] = asyncio.Queue()
        self.cancels: asyncio.Queue[Cancel] = asyncio.Queue()
        self.answers_cancels = True
        """Tell at once that a request has ended, as a scheduler does."""
        self.cancelled_fields: dict[str, Any] = {}
        """Of these ends."""

    async def submitted(self) -> Submit:
        """Wait for the next request."""
        return await asyncio.wait_for(self.submits.get(), 10)

    async def cancelled(self) -> Handle:
        """Wait for the next cancellation."""
        return (await asyncio.wait_for(self.cancels.get(), 10)).handle

    def send(self, events: SessionEvents) -> None:
        """Send one message of events."""
        self.outgoing.put_nowait(events)

    def ready(self, engine: EngineInfo = ENGINE) -> None:
        """Tell that the engine is ready."""
        self.send(SessionEvents(engine_ready=engine))

    def lost(self) -> None:
        """Tell that the engine is lost."""
        self.send(SessionEvents(engine_lost=True))

    def tokens(self, handle: Handle, *token_ids: int, logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Send tokens of one request in one message."""
        self.send(SessionEvents([handle] * len(token_ids), list(token_ids), token_logprobs=dict(enumerate(logprobs))))

    def prompt_logprobs(self, handle: Handle, first_position: int, *tokens: TokenLogprobs) -> None:
        """Send log probabilities of a piece of a prompt."""
        self.send(SessionEvents(prompt_logprobs=[(handle, PromptLogprobs(first_position, tokens))]))

    def end(
        self,
        handle: Handle,
        reason: FinishReason,
        *token_ids: int,
        logprobs: Sequence[TokenLogprobs] = (),
        **fields: Any,
    ) -> None:
        """End a request, its last tokens in the same message."""
        ended = Ended(handle=handle, reason=reason, **fields)
        self.send(
            SessionEvents([handle] * len(token_ids), list(token_ids), [ended], token_logprobs=dict(enumerate(logprobs)))
        )

    def drop(self) -> None:
        """End the stream once everything before is sent."""
        self.outgoing.put_nowait(None)


class FakeScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """The service; start and stop it as often as needed, it keeps its port."""

    def __init__(self, *, engine: EngineInfo | None = ENGINE) -> None:
        """``engine`` is told to each session at once; None leaves that to the test."""
        self.engine = engine
        self.status = EngineStatus(ready=True, reason="", epoch=1, info=ENGINE, workers=(), num_running=3)
        self.watched: asyncio.Queue[float] = asyncio.Queue()
        """Intervals of those who came to watch, seconds."""
        self.snapshots: asyncio.Queue[EngineSnapshot | None] = asyncio.Queue()
        """What the watcher is told; None ends its stream."""
        self.is_silent = False
        """Leave its streams open and answer no call, as one that hangs."""
        self._sessions: asyncio.Queue[FakeSession] = asyncio.Queue()
        self._server: RpcServer | None = None
        self._port = 0

    @property
    def address(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Listen, at the same port each time."""
        self._server = RpcServer()
        self._server.add(scheduler_pb2_grpc.add_SchedulerServicer_to_server, self, "orca.v1.Scheduler")
        self._port = await self._server.start("127.0.0.1", self._port)

    async def stop(self) -> None:
        """Die: all streams end at once."""
        assert self._server is not None
        await self._server.stop(0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.stop()

    async def session(self) -> FakeSession:
        """Wait for the next session to be opened."""
        return await asyncio.wait_for(self._sessions.get(), 10)

    async def Session(  # noqa: N802
        self, request_iterator: AsyncIterator[scheduler_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[scheduler_pb2.SessionEvents]:
        hello = session_request_from_pb(await anext(aiter(request_iterator)))
        assert isinstance(hello, Hello)
        session = FakeSession(hello.gateway_id)
        if self.engine is not None:
            session.ready(self.engine)
        self._sessions.put_nowait(session)
        reader = asyncio.create_task(self._read(request_iterator, session))
        try:
            while (events := await session.outgoing.get()) is not None:
                yield session_events_to_pb(events)
        finally:
            reader.cancel()
            session.closed.set()

    async def _read(self, requests: AsyncIterator[scheduler_pb2.SessionRequest], session: FakeSession) -> None:
        async for message in requests:
            match session_request_from_pb(message):
                case Submit() as submit:
                    session.submits.put_nowait(submit)
                case Cancel() as cancel:
                    session.cancels.put_nowait(cancel)
                    if session.answers_cancels:
                        session.end(cancel.handle, FinishReason.CANCELLED, **session.cancelled_fields)
                case Hello():
                    raise AssertionError("a second Hello")
        session.drop()

    async def GetEngineStatus(  # noqa: N802
        self, request: scheduler_pb2.GetEngineStatusRequest, context: Any
    ) -> scheduler_pb2.GetEngineStatusResponse:
        if self.is_silent:
            await asyncio.get_running_loop().create_future()
        return scheduler_pb2.GetEngineStatusResponse(status=engine_status_to_pb(self.status))

    async def WatchEngine(  # noqa: N802
        self, request: scheduler_pb2.WatchEngineRequest, context: Any
    ) -> AsyncIterator[common_pb2.EngineSnapshot]:
        self.watched.put_nowait(request.interval_ms / 1e3)
        while (snapshot := await self.snapshots.get()) is not None:
            yield engine_snapshot_to_pb(snapshot)
