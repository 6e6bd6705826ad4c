"""Workers without a model: they register, join and stream for real, and answer as a test scripts them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shared.codec.joining import join_progress_to_pb, join_request_from_pb, registration_to_pb
from shared.codec.step_columns import step_columns_from_pb
from shared.codec.steps import step_result_to_pb, timeline_to_pb
from shared.messages import Joined, JoinRequest, Loading, Registration, StepPlan, StepResult, StepTiming
from shared.pb import worker_pb2, worker_pb2_grpc
from shared.rpc import RpcServer, connect
from tests.fakes.plans import as_plan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from grpc import aio

    from shared.errors import OrcaError

__all__ = ["ScriptedWorker"]


@dataclass(eq=False)
class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """One rank. Plans arrive in ``plans``; what is put into ``results`` goes to the scheduler."""

    stage: int = 0
    tp_rank: int = 0
    num_blocks: int = 16
    max_model_len: int = 256
    join_error: OrcaError | None = None
    reads_plans: bool = True
    joins: list[JoinRequest] = field(default_factory=list)
    plans: asyncio.Queue[StepPlan] = field(default_factory=asyncio.Queue)
    results: asyncio.Queue[StepResult] = field(default_factory=asyncio.Queue)
    address: str = ""
    timings: list[StepTiming] = field(default_factory=list)
    """What it answers when it is asked for its timeline."""
    timeline_requests: list[worker_pb2.GetTimelineRequest] = field(default_factory=list)

    async def start(self) -> None:
        """Listen at a free port."""
        self.server = RpcServer()
        self.server.add(worker_pb2_grpc.add_WorkerServicer_to_server, self, "orca.v1.Worker")
        self.address = f"127.0.0.1:{await self.server.start('127.0.0.1', 0)}"

    async def kill(self) -> None:
        """Drop everything at once."""
        await self.server.stop(0)

    @contextlib.asynccontextmanager
    async def registered(self, scheduler: str, address: str | None = None) -> AsyncIterator[None]:
        """Hold the rank for as long as the block lasts."""
        async with connect(scheduler) as channel:
            claim = Registration(self.stage, self.tp_rank, address or self.address, "127.0.0.1:1", "cpu")
            call = worker_pb2_grpc.WorkerRegistryStub(channel).Register(registration_to_pb(claim))
            try:
                granted = await anext(aiter(call))
                assert granted.granted
                yield
            finally:
                call.cancel()

    def answer(self, plan: StepPlan, *token_ids: int) -> None:
        """Answer a plan; one token for all that sample, or one for each."""
        count = sum(plan.samples)
        tokens = list(token_ids) if len(token_ids) == count else [token_ids[0]] * count
        self.results.put_nowait(StepResult(plan.epoch, plan.step_id, tokens))

    async def Join(  # noqa: N802
        self, request: worker_pb2.JoinRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.JoinProgress]:
        self.joins.append(join_request_from_pb(request))
        yield join_progress_to_pb(Loading("weights", 1, 2))
        if self.join_error is not None:
            raise self.join_error
        for queue in (self.plans, self.results):
            while not queue.empty():
                queue.get_nowait()
        yield join_progress_to_pb(Joined(self.num_blocks, self.max_model_len, 1000, "float32", 1, 1))

    async def Execute(  # noqa: N802
        self, request_iterator: AsyncIterator[worker_pb2.StepPlan], context: aio.ServicerContext[Any, Any]
    ) -> worker_pb2.ExecuteSummary:
        if not self.reads_plans:
            await asyncio.get_running_loop().create_future()
        async for message in request_iterator:
            self.plans.put_nowait(as_plan(step_columns_from_pb(message)))
        return worker_pb2.ExecuteSummary()

    async def StreamResults(  # noqa: N802
        self, request: worker_pb2.StreamResultsRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.StepResult]:
        while True:
            yield step_result_to_pb(await self.results.get())

    async def GetTimeline(  # noqa: N802
        self, request: worker_pb2.GetTimelineRequest, context: aio.ServicerContext[Any, Any]
    ) -> worker_pb2.GetTimelineResponse:
        self.timeline_requests.append(request)
        after = request.after_step_id if request.HasField("after_step_id") else -1
        new = [timing for timing in self.timings if timing.step_id > after]
        return timeline_to_pb(self.stage, self.tp_rank, new, time.monotonic_ns())
