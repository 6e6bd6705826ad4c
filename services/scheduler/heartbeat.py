"""Whether the workers of an epoch still answer.

A process that hangs keeps its connections open, and so does a host that vanished: nothing but an answer that does not
come tells. Each worker is asked for its health, which its event loop answers and no computation holds up. One that is
silent loses its claim, by which the epoch is over and its rank free for another.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.scheduler.registry import WorkerRegistry
    from shared.messages import Registration

__all__ = ["watch_heartbeats"]


async def watch_heartbeats(
    workers: Sequence[tuple[Registration, aio.Channel]], registry: WorkerRegistry, heartbeat_s: float
) -> NoReturn:
    """Ask all workers every ``heartbeat_s`` seconds, and drop the claim of one that takes as long to answer."""
    async with asyncio.TaskGroup() as group:
        for claim, channel in workers:
            group.create_task(_watch(claim, channel, registry, heartbeat_s))
        # Without a claim the epoch is over, and whoever watches it ends this, too.
        await asyncio.get_running_loop().create_future()
    raise AssertionError("a group ends by its cancellation only")


async def _watch(claim: Registration, channel: aio.Channel, registry: WorkerRegistry, heartbeat_s: float) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    while True:
        try:
            await health.Check(health_pb2.HealthCheckRequest(), timeout=heartbeat_s)
        except aio.AioRpcError as failure:
            # Whatever else it says, somebody is there, or the streams of the epoch break by themselves.
            if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                get_logger().warning(
                    "worker_silent",
                    stage=claim.stage,
                    tp_rank=claim.tp_rank,
                    address=claim.address,
                    limit_s=heartbeat_s,
                )
                await registry.drop(claim, f"has not answered for {heartbeat_s:g} s")
                return
        await asyncio.sleep(heartbeat_s)
