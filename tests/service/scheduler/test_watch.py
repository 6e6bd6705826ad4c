"""Watching a scheduler: what snapshots say, and that nothing happens while nobody watches."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from services.scheduler.watch import EngineWatch
from shared.clock import SystemClock
from shared.codec.mesh_view import engine_snapshot_from_pb
from shared.errors import InvalidRequestError, OverloadedError
from shared.ids import StepId
from shared.mesh_view import MIN_INTERVAL_S
from shared.messages import EngineStatus, StepTiming
from shared.pb import scheduler_pb2, scheduler_pb2_grpc
from shared.rpc import connect
from shared.worker_client import WorkerClient
from tests.factories import make_submit
from tests.fakes.scripted_workers import ScriptedWorker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from shared.mesh_view import EngineSnapshot

    StartScheduler = Callable[..., contextlib.AbstractAsyncContextManager[Any]]

IDLE = EngineStatus(ready=False, reason="waiting for workers", epoch=0, info=None, workers=())


def timing(step_id: int) -> StepTiming:
    return StepTiming(StepId(step_id), 10 * step_id, 10 * step_id + 1, 10 * step_id + 9, 3, 7, 2)


@contextlib.asynccontextmanager
async def watching(address: str, interval_s: float = MIN_INTERVAL_S) -> AsyncIterator[AsyncIterator[EngineSnapshot]]:
    async with connect(address) as channel:
        request = scheduler_pb2.WatchEngineRequest(interval_ms=round(interval_s * 1e3))
        call = scheduler_pb2_grpc.SchedulerStub(channel).WatchEngine(request)
        try:
            yield (engine_snapshot_from_pb(message) async for message in call)
        finally:
            call.cancel()


@contextlib.asynccontextmanager
async def worker_of(scheduler: Any, worker: ScriptedWorker) -> AsyncIterator[ScriptedWorker]:
    await worker.start()
    try:
        async with worker.registered(scheduler.address):
            yield worker
    finally:
        await worker.kill()


async def test_a_watcher_sees_the_engine_at_work(start_scheduler: StartScheduler) -> None:
    first = ScriptedWorker(0, timings=[timing(0), timing(1)])
    last = ScriptedWorker(1, timings=[timing(0)])
    async with start_scheduler(num_stages=2) as scheduler:
        async with watching(scheduler.address) as snapshots:
            early = await anext(snapshots)
            assert not early.status.ready
            assert early.stages == ()
            assert early.output_tokens_per_s is None
        async with (
            worker_of(scheduler, first),
            worker_of(scheduler, last),
            scheduler.session() as session,
            watching(scheduler.address) as snapshots,
        ):
            await session.next()
            snapshot = await anext(snapshots)
            while not snapshot.status.ready:
                snapshot = await anext(snapshots)
            assert [stage.stage for stage in snapshot.stages] == [0, 1]
            assert snapshot.stages[0].steps == (timing(0), timing(1))
            assert snapshot.stages[1].steps[0].num_decode_tokens == 2
            await session.send(make_submit(0, max_tokens=2))
            for _ in range(2):
                last.answer(await first.plans.get(), 7)
            await session.until_ended(0)
            first.timings.append(timing(2))
            snapshot = await anext(snapshots)
            assert snapshot.stages[0].steps == (timing(2),), "only what is new"
            assert snapshot.stages[1].steps == ()
            assert snapshot.status.num_output_tokens == 2
            assert snapshot.output_tokens_per_s is not None
            assert 0 < snapshot.output_tokens_per_s <= 2 / MIN_INTERVAL_S
            assert snapshot.prefill_tokens_per_s is not None
            assert 0 < snapshot.prefill_tokens_per_s <= 5 / MIN_INTERVAL_S
            assert snapshot.steps_per_s is not None


async def test_watchers_share_one_look_and_nobody_is_asked_without_them(start_scheduler: StartScheduler) -> None:
    worker = ScriptedWorker(timings=[timing(0)])
    async with start_scheduler() as scheduler, worker_of(scheduler, worker):
        await scheduler.status_where(lambda status: status.ready)
        assert worker.timeline_requests == []
        async with contextlib.AsyncExitStack() as stack:
            watchers = [await stack.enter_async_context(watching(scheduler.address, 10)) for _ in range(8)]
            found = [await anext(watcher) for watcher in watchers]
            assert all(snapshot.stages[0].steps == (timing(0),) for snapshot in found)
            assert len(worker.timeline_requests) <= 2


async def test_a_dead_worker_does_not_end_the_watch(start_scheduler: StartScheduler) -> None:
    worker = ScriptedWorker()
    async with start_scheduler() as scheduler, watching(scheduler.address) as snapshots:
        async with worker_of(scheduler, worker):
            while not (await anext(snapshots)).status.ready:
                pass
        while (await anext(snapshots)).status.ready:
            pass
        assert (await anext(snapshots)).status.workers[0].state == "missing"


async def test_the_scheduler_leaves_without_waiting_for_watchers(start_scheduler: StartScheduler) -> None:
    async with start_scheduler() as scheduler, watching(scheduler.address, 10) as snapshots:
        await anext(snapshots)
        scheduler.shutdown.request("the test says so")
        assert [snapshot async for snapshot in snapshots] == []
        await scheduler.task


@pytest.mark.parametrize("interval_s", [0.0, 0.1, 11.0, float("nan")])
async def test_an_interval_out_of_range_is_refused(interval_s: float) -> None:
    watch = EngineWatch(lambda: IDLE, SystemClock(), connect=WorkerClient)
    with pytest.raises(InvalidRequestError, match=r"between 0\.25 and 10"):
        await anext(watch.snapshots(interval_s))


async def test_watchers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.watch.MAX_WATCHERS", 1)
    watch = EngineWatch(lambda: IDLE, SystemClock(), connect=WorkerClient)
    async with contextlib.aclosing(watch.snapshots(1)) as first:
        assert (await anext(first)).status is IDLE
        with pytest.raises(OverloadedError, match="1 watch this engine already"):
            await anext(watch.snapshots(1))
    async with contextlib.aclosing(watch.snapshots(1)) as second:
        assert (await anext(second)).status is IDLE
