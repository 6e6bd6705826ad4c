"""An epoch: one process group of all workers, from joining it to losing it.

``join_epoch`` brings every rank to it and opens the two streams that an iteration needs: control messages into the
leader of stage 0, results out of the leader of the last stage. When any of this breaks, the epoch is over as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from grpc import aio

from services.scheduler.core.capacity import Capacity
from shared.codec.joining import join_progress_from_pb, join_request_to_pb
from shared.codec.steps import step_plan_to_pb, step_result_from_pb
from shared.errors import EngineLostError, ModelError, UnavailableError
from shared.log import get_logger
from shared.messages import EngineInfo, Joined, JoinRequest, Registration
from shared.pb import worker_pb2, worker_pb2_grpc
from shared.rpc import connect, error_from_rpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from services.scheduler.registry import WorkerRegistry
    from shared.config import EngineConfig
    from shared.ids import Epoch
    from shared.messages import StepPlan, StepResult
    from shared.tls import TlsCredentials

__all__ = ["EngineLink", "join_epoch"]


def _name(claim: Registration) -> str:
    return f"worker of stage {claim.stage}, tensor-parallel rank {claim.tp_rank} at {claim.address}"


@dataclass(slots=True)
class EngineLink:
    """The engine of one epoch, as the scheduler's loop sees it."""

    epoch: Epoch
    capacity: Capacity
    info: EngineInfo
    workers: list[tuple[Registration, aio.Channel]]
    """In order of world rank."""
    _control: aio.StreamUnaryCall[worker_pb2.StepPlan, worker_pb2.ExecuteSummary]
    _results: aio.UnaryStreamCall[worker_pb2.StreamResultsRequest, worker_pb2.StepResult]
    _plans: asyncio.Queue[worker_pb2.StepPlan] = field(default_factory=asyncio.Queue)
    """On their way into stage 0: iterations in flight, so never many."""

    def send(self, plan: StepPlan) -> None:
        """Send a control message into stage 0; returns at once."""
        self._plans.put_nowait(step_plan_to_pb(plan))

    async def pump_plans(self) -> None:
        """Write control messages as they are sent. Never returns; raises ``EngineLostError`` when the stream breaks."""
        try:
            while True:
                await self._control.write(await self._plans.get())
        except (aio.AioRpcError, asyncio.InvalidStateError):
            await self.watch_plans()  # which tells why

    async def pump_results(self, deliver: Callable[[StepResult], None]) -> None:
        """Hand on results as they come. Never returns; raises ``EngineLostError`` when the stream ends."""
        try:
            async for message in self._results:
                deliver(step_result_from_pb(message))
        except aio.AioRpcError as failure:
            raise EngineLostError(str(error_from_rpc(failure, "results of the last stage"))) from failure
        raise EngineLostError("the last stage ended its results")

    async def watch_plans(self) -> None:
        """Wait for the control stream to break. Never returns; raises ``EngineLostError``."""
        try:
            await self._control
        except aio.AioRpcError as failure:
            raise EngineLostError(str(error_from_rpc(failure, "control stream of stage 0"))) from failure
        raise EngineLostError("stage 0 ended its control stream")


@contextlib.asynccontextmanager
async def join_epoch(
    epoch: Epoch, config: EngineConfig, registry: WorkerRegistry, tls: TlsCredentials | None = None
) -> AsyncIterator[EngineLink]:
    """Bring all registered workers into one process group; the streams are closed when the block ends.

    Raises ``ModelError`` or ``ConfigError`` where no retry can help, ``EngineLostError`` otherwise.
    """
    claims = await registry.wait_complete()
    topology = config.topology
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(connect(claim.address, tls)) for claim in claims]
        requests = [_join_request(epoch, config, claims, claim) for claim in claims]
        joined = await _all_joined(
            [
                _join(worker_pb2_grpc.WorkerStub(channel), request, claim, registry)
                for channel, request, claim in zip(channels, requests, claims, strict=True)
            ]
        )
        capacity = Capacity(
            num_blocks=min(rank.num_blocks for rank in joined),
            block_size=config.block_size,
            num_stages=topology.num_stages,
            max_model_len=min(rank.max_model_len for rank in joined),
            vocab_size=min(rank.vocab_size for rank in joined),
        )
        first = worker_pb2_grpc.WorkerStub(channels[0])
        last = worker_pb2_grpc.WorkerStub(channels[topology.world_rank(topology.num_stages - 1, 0)])
        control = first.Execute()
        stack.callback(control.cancel)
        results = last.StreamResults(worker_pb2.StreamResultsRequest(epoch=epoch))
        stack.callback(results.cancel)
        yield EngineLink(
            epoch=epoch,
            capacity=capacity,
            info=EngineInfo(
                model=config.model,
                max_model_len=capacity.max_model_len,
                vocab_size=capacity.vocab_size,
                num_slots=capacity.num_slots,
                block_size=capacity.block_size,
                num_stages=topology.num_stages,
                tp_size=topology.tp_size,
                dtype=joined[0].dtype,
            ),
            workers=list(zip(claims, channels, strict=True)),
            _control=control,
            _results=results,
        )


async def _all_joined(joins: list[Coroutine[None, None, Joined]]) -> list[Joined]:
    """All ranks at once, since they meet in the process group; a failure ends them all and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(join) for join in joins]
    except ExceptionGroup as failures:
        # A model that cannot be read is the cause, a peer that waited for it in vain only a symptom.
        causes = sorted(failures.exceptions, key=lambda error: isinstance(error, UnavailableError))
        raise causes[0] from None
    return [task.result() for task in tasks]


def _join_request(epoch: Epoch, config: EngineConfig, claims: list[Registration], claim: Registration) -> JoinRequest:
    topology = config.topology
    leads = claim.tp_rank == 0
    follows = leads and claim.stage + 1 < topology.num_stages
    return JoinRequest(
        epoch=epoch,
        stage=claim.stage,
        tp_rank=claim.tp_rank,
        num_stages=topology.num_stages,
        tp_size=topology.tp_size,
        rendezvous_address=claims[0].rendezvous_address,
        model=config.model,
        dtype=config.dtype,
        block_size=config.block_size,
        kv_memory_bytes=config.kv_memory_bytes,
        max_model_len=config.max_model_len,
        next_stage_address=claims[topology.world_rank(claim.stage + 1, 0)].address if follows else "",
        tp_addresses=tuple(
            claims[topology.world_rank(claim.stage, tp_rank)].address for tp_rank in range(1, topology.tp_size)
        )
        if leads
        else (),
        collective_timeout_s=config.collective_timeout_s,
        workers_append_tokens=config.workers_append_tokens,
    )


async def _join(
    stub: worker_pb2_grpc.WorkerAsyncStub, request: JoinRequest, claim: Registration, registry: WorkerRegistry
) -> Joined:
    rank = (claim.stage, claim.tp_rank)
    log = get_logger().bind(stage=claim.stage, tp_rank=claim.tp_rank, epoch=request.epoch)
    try:
        async for message in stub.Join(join_request_to_pb(request)):
            progress = join_progress_from_pb(message)
            if isinstance(progress, Joined):
                await registry.set_state(rank, "ready")
                log.info("worker_joined", num_blocks=progress.num_blocks, weights_bytes=progress.weights_bytes)
                return progress
            share = f" {100 * progress.done // progress.total} %" if progress.total else ""
            await registry.set_state(rank, "loading", progress.phase + share)
    except aio.AioRpcError as failure:
        error = error_from_rpc(failure, _name(claim))
        await registry.set_state(rank, "failed", str(error))
        if isinstance(error, UnavailableError):
            raise EngineLostError(
                f"{error}. Can the scheduler reach that address? If not, start the worker with another --advertise-host"
            ) from failure
        raise error from failure
    raise ModelError(f"{_name(claim)} ended its join without a word")
