"""What tools ask of a single worker: when steps passed through it. Not for the request path."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from grpc import aio

from shared.codec.steps import timeline_from_pb
from shared.pb import worker_pb2, worker_pb2_grpc
from shared.rpc import connect, error_from_rpc

if TYPE_CHECKING:
    from shared.ids import StepId
    from shared.messages import StepTiming
    from shared.tls import TlsCredentials

__all__ = ["WorkerClient", "WorkerTimeline", "fetch_timeline"]


class WorkerTimeline(NamedTuple):
    """Steps of a worker and its present, both by its host's monotonic clock."""

    now_ns: int
    steps: list[StepTiming]
    """Oldest first."""


class WorkerClient:
    """A client of the worker at ``address`` (host:port), for somebody who asks again and again."""

    def __init__(self, address: str, *, tls: TlsCredentials | None = None) -> None:
        self._address = address
        self._channel = connect(address, tls)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def timeline(
        self, max_steps: int = 0, *, after: StepId | None = None, timeout_s: float = 10.0
    ) -> WorkerTimeline:
        """Return the latest ``max_steps`` steps, those after one step only; 0 is all that the worker keeps.

        Raises:
            OrcaError: the worker does not answer in time.
        """
        request = worker_pb2.GetTimelineRequest(max_steps=max_steps, after_step_id=after)
        try:
            response = await self._stub.GetTimeline(request, timeout=timeout_s)
        except aio.AioRpcError as failure:
            raise error_from_rpc(failure, f"worker at {self._address}") from failure
        return WorkerTimeline(response.now_ns, timeline_from_pb(response))


async def fetch_timeline(address: str, max_steps: int = 0) -> list[StepTiming]:
    """Return the latest steps of the worker at ``address`` (host:port), oldest first; 0 is all that it keeps."""
    worker = WorkerClient(address)
    try:
        return (await worker.timeline(max_steps)).steps
    finally:
        await worker.close()
