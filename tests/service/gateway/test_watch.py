"""Watching the mesh through a gateway over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from shared.client import GatewayClient
from shared.errors import InvalidRequestError, OverloadedError, UnavailableError
from shared.ids import StepId
from shared.mesh_view import MIN_INTERVAL_S, EngineSnapshot, StageTimeline
from shared.messages import EngineStatus, StepTiming
from tests.fakes.fake_scheduler import ENGINE

if TYPE_CHECKING:
    from tests.service.gateway.conftest import RunningGateway, StartGateway  # only for the type checker

READY = EngineStatus(ready=True, reason="", epoch=1, info=ENGINE, workers=(), num_running=3)
SNAPSHOT = EngineSnapshot(
    READY, 99, (StageTimeline(0, (StepTiming(StepId(4), 1, 2, 3, 2, 9, 1),)),), output_tokens_per_s=12.5
)


async def test_what_the_scheduler_says_and_the_gateway_knows(gateway: RunningGateway) -> None:
    gateway.scheduler.snapshots.put_nowait(SNAPSHOT)
    async with contextlib.aclosing(gateway.client.watch(0.5)) as snapshots:
        seen = await anext(snapshots)
        assert await gateway.scheduler.watched.get() == 0.5
        assert seen.engine == SNAPSHOT
        assert seen.gateway_id == gateway.address
        assert seen.num_gateway_requests == 0
        async with contextlib.aclosing(gateway.client.generate("hello")) as deltas:
            await anext(deltas)
            gateway.scheduler.snapshots.put_nowait(SNAPSHOT)
            assert (await anext(snapshots)).num_gateway_requests == 1


async def test_a_scheduler_that_leaves_is_seen_and_comes_back(gateway: RunningGateway) -> None:
    gateway.scheduler.snapshots.put_nowait(SNAPSHOT)
    async with contextlib.aclosing(gateway.client.watch(MIN_INTERVAL_S)) as snapshots:
        assert (await anext(snapshots)).engine.status.ready
        await gateway.scheduler.stop()
        lost = (await anext(snapshots)).engine
        assert not lost.status.ready
        assert "the scheduler" in lost.status.reason
        await gateway.scheduler.start()
        gateway.scheduler.snapshots.put_nowait(SNAPSHOT)
        async for snapshot in snapshots:
            if snapshot.engine.stages:
                break


async def test_a_gateway_without_a_tokenizer_is_not_ready(start_gateway: StartGateway) -> None:
    async with start_gateway() as running:
        await running.health(serving=True)
        running.session.lost()
        await running.health(serving=False)
        running.scheduler.snapshots.put_nowait(SNAPSHOT)
        async with contextlib.aclosing(running.client.watch()) as snapshots:
            status = (await anext(snapshots)).engine.status
            assert not status.ready
            assert "recovering" in status.reason


async def test_the_gateway_leaves_without_waiting_for_watchers(gateway: RunningGateway) -> None:
    gateway.scheduler.snapshots.put_nowait(SNAPSHOT)
    async with contextlib.aclosing(gateway.client.watch(10)) as snapshots:
        await anext(snapshots)
        gateway.shutdown.request("the test says so")
        assert [snapshot async for snapshot in snapshots] == []
    await asyncio.wait_for(gateway.task, 10)


async def test_intervals_out_of_range_are_refused(gateway: RunningGateway) -> None:
    with pytest.raises(InvalidRequestError, match="must be between"):
        await anext(gateway.client.watch(0.1))


async def test_watchers_are_bounded(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.watch.MAX_WATCHERS", 1)
    gateway.scheduler.snapshots.put_nowait(SNAPSHOT)
    async with contextlib.aclosing(gateway.client.watch(10)) as first:
        await anext(first)
        with pytest.raises(OverloadedError, match="1 watch this gateway already"):
            await anext(gateway.client.watch(10))


async def test_nobody_there(unused_port: int) -> None:
    async with GatewayClient(f"127.0.0.1:{unused_port}") as client:
        with pytest.raises(UnavailableError):
            await anext(client.watch())
