"""The scheduler as a worker sees it: a registry to claim a rank at, and the calls of an epoch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from services.worker.app import run_worker
from shared.codec.joining import join_progress_from_pb, join_request_to_pb, registration_from_pb
from shared.codec.steps import step_plan_to_pb, step_result_from_pb, timeline_from_pb
from shared.config import ObservabilityConfig, WorkerConfig
from shared.ids import BlockId, Epoch, RequestId, Row, StepId
from shared.lifecycle import Shutdown
from shared.messages import (
    Joined,
    JoinRequest,
    Loading,
    NewSequence,
    Registration,
    SamplingParams,
    StepPlan,
    StepResult,
    StepTiming,
    token_ids,
)
from shared.pb import worker_pb2, worker_pb2_grpc
from shared.rpc import RpcServer, connect
from tests.fakes.plans import received

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from grpc import aio

    from shared.codec.step_columns import StepColumns
    from shared.errors import OrcaError

__all__ = [
    "FakeRegistry",
    "RankClient",
    "SpawnedWorker",
    "columns",
    "join_all",
    "join_request",
    "plan",
    "running_worker",
    "sequence",
    "spawned_worker",
]


@dataclass(eq=False)
class FakeRegistry(worker_pb2_grpc.WorkerRegistryServicer):
    """Grants every claim, or refuses with ``refusal``; claims arrive in ``claims``."""

    refusal: OrcaError | None = None
    claims: asyncio.Queue[Registration] = field(default_factory=asyncio.Queue)
    ended: asyncio.Queue[Registration] = field(default_factory=asyncio.Queue)
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    """Asks a worker in this process to leave."""
    address: str = ""

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[FakeRegistry]:
        server = RpcServer()
        server.add(worker_pb2_grpc.add_WorkerRegistryServicer_to_server, self, "orca.v1.WorkerRegistry")
        self.address = f"127.0.0.1:{await server.start('127.0.0.1', port)}"
        try:
            yield self
        finally:
            await server.stop(0)

    async def Register(  # noqa: N802
        self, request: worker_pb2.RegisterRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.RegistryEvent]:
        claim = registration_from_pb(request)
        if self.refusal is not None:
            raise self.refusal
        self.claims.put_nowait(claim)
        try:
            yield worker_pb2.RegistryEvent(granted=True)
            await asyncio.get_running_loop().create_future()
        finally:
            self.ended.put_nowait(claim)

    async def Leave(  # noqa: N802
        self, request: worker_pb2.LeaveRequest, context: aio.ServicerContext[Any, Any]
    ) -> worker_pb2.LeaveResponse:
        return worker_pb2.LeaveResponse()


@contextlib.asynccontextmanager
async def running_worker(
    registry: FakeRegistry, observability: ObservabilityConfig | None = None
) -> AsyncIterator[Registration]:
    """Run a worker in this process for as long as the block lasts."""
    shutdown = Shutdown(grace_s=5.0)
    config = WorkerConfig(
        scheduler=registry.address, device="cpu", observability=observability or ObservabilityConfig()
    )
    task = asyncio.create_task(run_worker(config, shutdown))
    leaving = asyncio.create_task(registry.leave.wait())
    leaving.add_done_callback(lambda _: shutdown.request("test over"))
    try:
        yield await registry.claims.get()
    finally:
        leaving.cancel()
        await task


@dataclass(frozen=True, slots=True)
class SpawnedWorker:
    """A worker in a process of its own, and a client of it."""

    process: asyncio.subprocess.Process
    claim: Registration
    client: RankClient


@contextlib.asynccontextmanager
async def spawned_worker(registry: FakeRegistry, stage: int = 0, tp_rank: int = 0) -> AsyncIterator[SpawnedWorker]:
    """Run ``python -m services.worker`` for as long as the block lasts; it must leave when asked, unless killed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.worker", "--scheduler", registry.address, "--device", "cpu"),
        *("--stage", str(stage), "--tp-rank", str(tp_rank), "--threads", "1"),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    output = asyncio.create_task(process.communicate())
    try:
        claiming = asyncio.create_task(registry.claims.get())
        await asyncio.wait({claiming, output}, return_when=asyncio.FIRST_COMPLETED)
        assert claiming.done(), f"the worker ended: {output.result()[1].decode()}"
        claim = claiming.result()
        async with RankClient.connected(claim.address) as client:
            yield SpawnedWorker(process, claim, client)
    finally:
        claiming.cancel()
        if process.returncode is None:
            process.terminate()
        _, errors = await output
        sys.stderr.write(errors.decode())  # pytest shows it when the test failed
    assert process.returncode in {0, -9}, f"exit code {process.returncode}: {errors.decode()}"


async def join_all(model: str, *workers: SpawnedWorker, **fields: Any) -> list[Joined]:
    """Let all workers join one epoch: those of rank 0 are the stages, the others belong to the stage of their claim."""
    claims = {(worker.claim.stage, worker.claim.tp_rank): worker.claim for worker in workers}
    num_stages, tp_size = (1 + max(place) for place in zip(*claims, strict=True))
    progress = await asyncio.gather(
        *(
            worker.client.join(
                join_request(
                    model,
                    stage=stage,
                    tp_rank=tp_rank,
                    num_stages=num_stages,
                    tp_size=tp_size,
                    rendezvous_address=claims[0, 0].rendezvous_address,
                    next_stage_address=claims[stage + 1, 0].address if not tp_rank and stage + 1 < num_stages else "",
                    tp_addresses=tuple(claims[stage, rank].address for rank in range(1, tp_size))
                    if not tp_rank
                    else (),
                    **fields,
                )
            )
            for worker in workers
            for stage, tp_rank in [(worker.claim.stage, worker.claim.tp_rank)]
        )
    )
    return [joined for *_, joined in progress if isinstance(joined, Joined)]


@dataclass(eq=False)
class RankClient:
    """A scheduler's calls to one worker."""

    channel: aio.Channel

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, address: str) -> AsyncIterator[RankClient]:
        async with connect(address) as channel:
            yield cls(channel)

    @property
    def stub(self) -> worker_pb2_grpc.WorkerAsyncStub:
        return worker_pb2_grpc.WorkerStub(self.channel)

    async def join(self, request: JoinRequest) -> list[Loading | Joined]:
        return [join_progress_from_pb(message) async for message in self.stub.Join(join_request_to_pb(request))]

    def execute(self) -> Control:
        return Control(self.stub.Execute())

    def results(self, epoch: int = 1) -> Results:
        return Results(self.stub.StreamResults(worker_pb2.StreamResultsRequest(epoch=epoch)))

    async def timeline(self) -> list[StepTiming]:
        return timeline_from_pb(await self.stub.GetTimeline(worker_pb2.GetTimelineRequest()))


@dataclass(eq=False)
class Control:
    """A control stream."""

    call: aio.StreamUnaryCall[worker_pb2.StepPlan, worker_pb2.ExecuteSummary]

    async def send(self, *plans: StepPlan) -> None:
        for step in plans:
            await self.call.write(step_plan_to_pb(step))

    async def finish(self) -> int:
        await self.call.done_writing()
        return (await self.call).num_steps


@dataclass(eq=False)
class Results:
    """A stream of results."""

    call: aio.UnaryStreamCall[worker_pb2.StreamResultsRequest, worker_pb2.StepResult]

    async def next(self) -> StepResult:
        message = await self.call.read()
        assert isinstance(message, worker_pb2.StepResult), f"the stream ended: {await self.call.details()}"
        return step_result_from_pb(message)


def join_request(model: str = "synthetic:", **fields: Any) -> JoinRequest:
    defaults: dict[str, Any] = {
        "epoch": Epoch(1),
        "stage": 0,
        "tp_rank": 0,
        "num_stages": 1,
        "tp_size": 1,
        "rendezvous_address": "",
        "model": model,
        "dtype": "auto",
        "block_size": 16,
        "kv_memory_bytes": 4 << 20,
        "max_model_len": 0,
        "next_stage_address": "",
        "tp_addresses": (),
        "collective_timeout_s": 20,
    }
    return JoinRequest(**{**defaults, **fields})


def sequence(row: int, tokens: Sequence[int], sampling: SamplingParams | None = None) -> NewSequence:
    return NewSequence(
        row=Row(row),
        request_id=RequestId(f"request-{row}"),
        token_ids=token_ids(tokens),
        num_prompt_tokens=len(tokens),
        sampling=sampling or SamplingParams(temperature=0.0),
    )


def plan(step_id: int, *entries: tuple[int, int, int], epoch: int = 1, **fields: Any) -> StepPlan:
    """Build a plan that samples for every ``(row, num_computed_tokens, num_tokens)``; ``fields`` override columns."""
    defaults: dict[str, Any] = {
        "epoch": Epoch(epoch),
        "step_id": StepId(step_id),
        "rows": [Row(row) for row, _, _ in entries],
        "num_computed_tokens": [computed for _, computed, _ in entries],
        "num_tokens": [tokens for _, _, tokens in entries],
        "samples": [True] * len(entries),
        "num_appended_tokens": [0] * len(entries),
        "appended_token_ids": [],
        "num_new_blocks": [0] * len(entries),
        "new_block_ids": [],
        "new_sequences": [],
        "released_rows": [],
    }
    built = {**defaults, **fields}
    built["new_block_ids"] = [BlockId(block) for block in built["new_block_ids"]]
    return StepPlan(**built)


def columns(step_id: int, *entries: tuple[int, int, int], **fields: Any) -> StepColumns:
    """Return the same as a worker gets it."""
    return received(plan(step_id, *entries, **fields))
