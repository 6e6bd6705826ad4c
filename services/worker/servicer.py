"""The worker's gRPC face: protobuf in, protobuf out, and the order of things for each control message."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from services.worker.forwarding import Onward, peers_of
from shared.codec.joining import join_progress_to_pb, join_request_from_pb
from shared.codec.step_columns import step_columns_from_pb
from shared.codec.steps import step_result_to_pb, timeline_to_pb
from shared.errors import EngineLostError, OrcaError, ProtocolError
from shared.ids import StepId
from shared.pb import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from grpc import aio

    from services.worker.engine import Engine
    from services.worker.membership import Membership
    from shared.clock import Clock
    from shared.tls import TlsCredentials

__all__ = ["WorkerServicer"]


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """``orca.v1.Worker`` for one rank."""

    def __init__(
        self, stage: int, tp_rank: int, engine: Engine, clock: Clock, tls: TlsCredentials | None = None
    ) -> None:
        """``tls`` is for the calls to other workers."""
        self._stage = stage
        self._tp_rank = tp_rank
        self._engine = engine
        self._clock = clock
        self._tls = tls

    async def Join(  # noqa: N802 - the contract's name
        self, request: worker_pb2.JoinRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.JoinProgress]:
        """Join an epoch; cancelling the call gives up."""
        del context
        async with contextlib.aclosing(self._engine.join(join_request_from_pb(request))) as progress:
            async for step in progress:
                yield join_progress_to_pb(step)

    async def Execute(  # noqa: N802
        self, request_iterator: AsyncIterator[worker_pb2.StepPlan], context: aio.ServicerContext[Any, Any]
    ) -> worker_pb2.ExecuteSummary:
        """Take control messages until the stream is half-closed, then wait until all of them are computed.

        The epoch ends with its stream. Only one that is refused at its first message leaves it as it is.
        """
        del context
        membership = self._engine.membership()
        with membership.executing():
            async with Onward(peers_of(membership.request), membership.end, self._tls) as onward:
                pump = asyncio.create_task(self._pump(request_iterator, membership, onward))
                try:
                    await _first_of(pump, membership.over)
                finally:
                    pump.cancel()
                    # However it ended, nothing more will come: one that was cancelled can look like one that ended
                    # well, and this handler can be cancelled at any point. A pump that fails has said why itself.
                    if not _has_failed(pump):
                        membership.end(EngineLostError("the control stream was closed by its sender"))
                    await asyncio.gather(pump, return_exceptions=True)
                if membership.over.done() and (pump.cancelled() or pump.exception() is not None):
                    raise membership.over.result()
                return worker_pb2.ExecuteSummary(num_steps=pump.result())

    async def StreamResults(  # noqa: N802
        self, request: worker_pb2.StreamResultsRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.StepResult]:
        """Stream the results of the current epoch, each once."""
        del context
        membership = self._engine.membership()
        if request.epoch != membership.request.epoch:
            raise ProtocolError(
                f"results of epoch {request.epoch} were asked for; this worker is in epoch {membership.request.epoch}"
            )
        async with contextlib.aclosing(membership.results()) as results:
            async for result in results:
                yield step_result_to_pb(result)

    async def GetTimeline(  # noqa: N802
        self, request: worker_pb2.GetTimelineRequest, context: aio.ServicerContext[Any, Any]
    ) -> worker_pb2.GetTimelineResponse:
        """Return when the latest steps arrived, began and ended here."""
        del context
        after = StepId(request.after_step_id) if request.HasField("after_step_id") else None
        timings = self._engine.timeline.latest(request.max_steps, after=after)
        return timeline_to_pb(self._stage, self._tp_rank, timings, self._clock.now_ns())

    async def _pump(self, messages: AsyncIterator[worker_pb2.StepPlan], membership: Membership, onward: Onward) -> int:
        """Take each message, pass it on, and only then let it be computed; return how many there were."""
        num_steps = 0
        try:
            async for message in messages:
                received_ns = self._clock.now_ns()
                if not num_steps and message.epoch != membership.request.epoch:
                    # A late word of a past epoch does no harm to this one.
                    num_steps = -1
                membership.admit(message.epoch, message.step_id)
                num_steps += 1
                await onward.write(message)
                await membership.submit(step_columns_from_pb(message), received_ns)
            await membership.drained()
            await onward.finish()
        except OrcaError as error:
            if num_steps >= 0:
                membership.end(error)
            raise
        except Exception as crash:
            membership.end(EngineLostError(f"a control message could not be taken: {crash}"))
            raise
        return num_steps


def _has_failed(task: asyncio.Task[int]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done, whatever its outcome."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
