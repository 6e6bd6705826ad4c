"""Wiring of the worker: options to objects, objects to a service that runs until it is asked to leave."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import structlog
import torch

from services.worker.engine import Engine
from services.worker.metrics import WorkerMetrics
from services.worker.registration import ask_to_leave, hold_claim
from services.worker.rendezvous import RendezvousServer
from services.worker.servicer import WorkerServicer
from services.worker.tracing import StageTracer
from shared.clock import SystemClock
from shared.errors import ConfigError
from shared.log import get_logger
from shared.messages import Registration
from shared.metrics import ServiceMetrics
from shared.metrics_server import metrics_served
from shared.pb import worker_pb2_grpc
from shared.rpc import RpcServer, bound_address
from shared.tls import load_tls
from shared.tracing import open_tracer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from shared.config import WorkerConfig
    from shared.lifecycle import Shutdown

__all__ = ["run_worker"]

_WILDCARD_HOSTS = {"0.0.0.0", "::"}  # noqa: S104 - compared, not bound


async def run_worker(config: WorkerConfig, shutdown: Shutdown) -> None:
    """Serve one rank until ``shutdown`` is requested.

    Raises ``ConfigError`` for options that cannot work here, and ``AlreadyClaimedError`` or ``ConfigError`` when the
    scheduler refuses this worker.
    """
    device_type = _device_type(config.device)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    tls = load_tls(config.mesh_tls)
    server = RpcServer(tls=tls)
    clock = SystemClock()
    listen_host = config.listen.host
    advertised_host = config.advertise_host or listen_host
    rank_metrics = WorkerMetrics(config.stage, config.tp_rank)
    metrics = ServiceMetrics("worker", rank_metrics)
    # One span for each stage: those of its other ranks would say the same.
    leads = config.tp_rank == 0
    tracer = open_tracer("worker", config.observability, clock, **{"orca.stage": config.stage}) if leads else None
    engine = Engine(
        stage=config.stage,
        tp_rank=config.tp_rank,
        host=advertised_host if listen_host in _WILDCARD_HOSTS else listen_host,
        choose_device=lambda world_rank: _device(device_type, world_rank),
        clock=clock,
        set_ready=server.set_ready,
        observers=[rank_metrics, *([] if tracer is None else [StageTracer(tracer, config.stage)])],
    )
    server.add(
        worker_pb2_grpc.add_WorkerServicer_to_server,
        WorkerServicer(config.stage, config.tp_rank, engine, clock, tls),
        "orca.v1.Worker",
    )
    with structlog.contextvars.bound_contextvars(service="worker", stage=config.stage, tp_rank=config.tp_rank):
        address = bound_address(advertised_host, await server.start(listen_host, config.listen.port))
        get_logger().info("service_listening", address=address, device=device_type, num_threads=torch.get_num_threads())
        claim = Registration(config.stage, config.tp_rank, address, "", device_type)
        is_first = (config.stage, config.tp_rank) == (0, 0)
        # Outlives the claim: this worker may itself be waiting at the store when it is asked to leave.
        rendezvous = RendezvousServer(listen_host, advertised_host) if is_first else None
        try:
            async with metrics_served(metrics, config.observability.metrics):
                await _hold_until_asked(
                    hold_claim(config.scheduler, claim, rendezvous, tls),
                    shutdown,
                    lambda: ask_to_leave(config.scheduler, claim, timeout_s=shutdown.grace_s, tls=tls),
                )
        finally:
            await server.set_ready(ready=False)
            await engine.close(shutdown.remaining_s)
            await server.stop(1.0)
            if tracer is not None:
                await tracer.close()


async def _hold_until_asked(
    claim: Coroutine[None, None, None], shutdown: Shutdown, leave: Callable[[], Awaitable[None]]
) -> None:
    """Hold the claim until asked to leave, and on until ``leave`` lets go."""
    holding = asyncio.create_task(claim)
    asked = asyncio.create_task(shutdown.wait())
    try:
        await asyncio.wait({holding, asked}, return_when=asyncio.FIRST_COMPLETED)
        if holding.done():
            holding.result()
        get_logger().info("draining", grace_s=shutdown.grace_s)
        await leave()
    finally:
        for task in (holding, asked):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


def _device_type(choice: str) -> str:
    has_gpu = torch.cuda.is_available()
    if choice == "cuda" and not has_gpu:
        raise ConfigError("--device cuda: torch finds no GPU here; check the driver, or use --device cpu")
    if choice == "auto":
        return "cuda" if has_gpu else "cpu"
    return choice


def _device(device_type: str, world_rank: int) -> torch.device:
    """Spread ranks over the GPUs that this process sees."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", world_rank % torch.cuda.device_count())
