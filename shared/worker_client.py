"""What tools ask of a single worker: when steps passed through it. Not for the request path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpc import aio

from shared.codec.steps import timeline_from_pb
from shared.pb import worker_pb2, worker_pb2_grpc
from shared.rpc import connect, error_from_rpc

if TYPE_CHECKING:
    from shared.messages import StepTiming

__all__ = ["fetch_timeline"]


async def fetch_timeline(address: str, max_steps: int = 0) -> list[StepTiming]:
    """Return the latest steps of the worker at ``address`` (host:port), oldest first; 0 is all that it keeps."""
    async with connect(address) as channel:
        try:
            response = await worker_pb2_grpc.WorkerStub(channel).GetTimeline(
                worker_pb2.GetTimelineRequest(max_steps=max_steps), timeout=10
            )
        except aio.AioRpcError as failure:
            raise error_from_rpc(failure, f"worker at {address}") from failure
    return timeline_from_pb(response)
