"""The scheduler service: wiring, readiness, drain."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from services.scheduler.core.core import SchedulerCore
from services.scheduler.keeper import EngineKeeper
from services.scheduler.loop import EngineLoop
from services.scheduler.metrics import EngineMetrics, LoopMetrics
from services.scheduler.registry import WorkerRegistry, WorkerRegistryServicer
from services.scheduler.servicer import SchedulerServicer
from services.scheduler.watch import EngineWatch
from shared.clock import SystemClock
from shared.log import get_logger
from shared.messages import EngineStatus
from shared.metrics import ServiceMetrics
from shared.metrics_server import metrics_served
from shared.pb import scheduler_pb2_grpc, worker_pb2_grpc
from shared.rpc import RpcServer, bound_address
from shared.tls import load_tls
from shared.tracing import open_tracer
from shared.worker_client import WorkerClient

if TYPE_CHECKING:
    from shared.config import SchedulerConfig
    from shared.lifecycle import Shutdown

__all__ = ["run_scheduler"]

_STOP_GRACE_S = 0.5
"""What is left to say once everything has drained: the ends of streams."""


async def run_scheduler(
    config: SchedulerConfig, shutdown: Shutdown, listening: asyncio.Future[str] | None = None
) -> None:
    """Serve until asked to leave; then let the requests in the pool end, for ``shutdown.grace_s`` at most.

    ``listening`` is given the address, for callers in the same process.
    """
    core = SchedulerCore(config.engine.scheduling)
    clock = SystemClock()
    tracer = open_tracer("scheduler", config.observability, clock)
    loop_metrics = LoopMetrics()
    loop = EngineLoop(core, clock, loop_metrics, tracer)
    registry = WorkerRegistry(config.engine.topology)
    tls = load_tls(config.mesh_tls)
    server = RpcServer(tls=tls)
    keeper = EngineKeeper(config, registry, loop, server, tls)
    watch = EngineWatch(lambda: _status(keeper, registry, loop), clock, connect=partial(WorkerClient, tls=tls))
    sessions = SchedulerServicer(loop, lambda: _status(keeper, registry, loop), watch)
    engine_metrics = EngineMetrics(
        lambda: _status(keeper, registry, loop), has_prefix_cache=config.engine.scheduling.prefix_cache
    )
    metrics = ServiceMetrics("scheduler", engine_metrics, loop_metrics)
    server.add(scheduler_pb2_grpc.add_SchedulerServicer_to_server, sessions, "orca.v1.Scheduler")
    server.add(
        worker_pb2_grpc.add_WorkerRegistryServicer_to_server,
        WorkerRegistryServicer(registry, keeper.wind_down),
        "orca.v1.WorkerRegistry",
    )
    async with metrics_served(metrics, config.observability.metrics):
        port = await server.start(config.listen.host, config.listen.port)
        address = bound_address(config.listen.host, port)
        get_logger().info("service_listening", address=address)
        if listening is not None:
            listening.set_result(address)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(loop.run()), tasks.create_task(keeper.run())]
                asked = tasks.create_task(shutdown.wait())
                done, _ = await asyncio.wait([asked, *running], return_when=asyncio.FIRST_COMPLETED)
                if asked not in done:
                    if any(task.cancelled() or task.exception() is None for task in done):
                        raise RuntimeError("a task of the scheduler ended by itself")
                    await asyncio.get_running_loop().create_future()  # the group cancels this for the task that failed
                get_logger().info("draining", grace_s=shutdown.grace_s)
                keeper.reason = "the scheduler is shutting down"
                await server.set_ready(ready=False)
                try:
                    async with asyncio.timeout(shutdown.grace_s):
                        await loop.drain()
                except TimeoutError:
                    get_logger().warning("drain_timed_out", num_running=loop.stats().num_running)
                for task in running:
                    task.cancel()
        finally:
            sessions.close_sessions()
            watch.close()
            await registry.close()
            await server.stop(_STOP_GRACE_S)
            if tracer is not None:
                await tracer.close()


def _status(keeper: EngineKeeper, registry: WorkerRegistry, loop: EngineLoop) -> EngineStatus:
    stats = loop.stats()
    is_ready = loop.info is not None and not loop.is_retiring
    return EngineStatus(
        ready=is_ready,
        reason="" if is_ready else _reason(keeper, registry),
        epoch=keeper.epoch,
        info=loop.info,
        workers=registry.statuses(),
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_in_flight_steps=stats.num_in_flight_steps,
        num_used_slots=stats.num_used_slots,
        num_cached_slots=stats.num_cached_slots,
        num_preempted=stats.num_preempted,
        num_preemptions=stats.num_preemptions,
        num_prompt_tokens=stats.num_prompt_tokens,
        num_cached_prompt_tokens=stats.num_cached_prompt_tokens,
        num_broken_invariants=loop.num_broken_invariants,
        num_steps=stats.num_steps,
        num_output_tokens=stats.num_output_tokens,
        num_finished=stats.num_finished,
        last_batch_size=stats.last_batch_size,
        last_batch_tokens=stats.last_batch_tokens,
    )


def _reason(keeper: EngineKeeper, registry: WorkerRegistry) -> str:
    """Why the engine is not ready, with the names of those it waits for."""
    if missing := registry.missing():
        return "waiting for workers: " + ", ".join(f"stage {stage} rank {tp_rank}" for stage, tp_rank in missing)
    if keeper.reason:
        return keeper.reason
    late = [
        f"stage {worker.stage} rank {worker.tp_rank} ({worker.detail or worker.state})"
        for worker in registry.statuses()
        if worker.state != "ready"
    ]
    return ": ".join(["the workers are loading the model", *filter(None, [", ".join(late)])])
