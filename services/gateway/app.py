"""The gateway service: wiring, readiness, drain."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from services.gateway.api_keys import Authenticator
from services.gateway.clients import bind_client
from services.gateway.generation import Generation
from services.gateway.guidance import GuidanceCompiler
from services.gateway.metrics import GatewayMetrics
from services.gateway.observation import AccessLog
from services.gateway.readiness import Readiness
from services.gateway.request_limit import RequestLimit
from services.gateway.scheduler_client import SchedulerClient
from services.gateway.served_model import ModelText, load_model_text
from services.gateway.servicer import GatewayServicer
from services.gateway.streams import StreamTable
from services.gateway.tracing import RequestTracer
from services.gateway.watch import MeshWatch
from shared.clock import SystemClock
from shared.log import get_logger
from shared.metrics import ServiceMetrics
from shared.metrics_server import metrics_served
from shared.pb import gateway_pb2_grpc
from shared.rpc import RpcServer, bound_address
from shared.status import StatusCode
from shared.tls import load_tls
from shared.tracing import open_tracer

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.gateway.http.server import HttpServer
    from services.gateway.observation import RequestObserver
    from shared.config import GatewayConfig, HttpConfig
    from shared.lifecycle import Shutdown
    from shared.tls import TlsFiles

__all__ = ["run_gateway"]

_MAX_REQUEST_BYTES = 8 << 20
"""Of a call, as over HTTP by default. A message may stand for much more memory than it takes itself."""

_STOP_GRACE_S = 1.0
"""What is left to say once everything has drained: the ends of streams."""


async def run_gateway(
    config: GatewayConfig, shutdown: Shutdown, *, load: Callable[[str], ModelText] = load_model_text
) -> None:
    """Serve until asked to leave; then let the requests in service end, for ``shutdown.grace_s`` at most.

    ``load`` finds the text side of the engine's model by its name, in a thread.
    """
    clock = SystemClock()
    limit = RequestLimit(
        config.max_requests, max_queued=config.max_queued, max_queued_bytes=config.max_queued_bytes, clock=clock
    )
    keys = Authenticator(Path(config.api_keys) if config.api_keys else None)
    streams = StreamTable(clock)
    readiness = Readiness(load)
    mesh_tls = load_tls(config.mesh_tls)
    scheduler = SchedulerClient(
        config.scheduler,
        streams,
        readiness,
        max_queued=config.max_requests,
        heartbeat_s=config.heartbeat_s,
        tls=mesh_tls,
    )
    server = RpcServer(
        max_request_bytes=_MAX_REQUEST_BYTES,
        tls=load_tls(config.tls),
        authenticate=(lambda header: bind_client(keys.authenticate(header))) if keys.requires_key else None,
    )
    watch = MeshWatch(
        scheduler,
        readiness,
        gateway_id=lambda: bound_address(config.listen.host, server.port or 0),
        num_requests=lambda: limit.num_requests,
    )
    requests = GatewayMetrics(limit)
    metrics = ServiceMetrics("gateway", requests)
    tracer = open_tracer("gateway", config.observability, clock)
    observers: list[RequestObserver] = [AccessLog(), requests, *([] if tracer is None else [RequestTracer(tracer)])]
    guidance = GuidanceCompiler()
    generation = Generation(scheduler, readiness, limit, clock, guidance, observers)
    servicer = GatewayServicer(generation, watch)
    server.add(gateway_pb2_grpc.add_GatewayServicer_to_server, servicer, "orca.v1.Gateway")
    try:
        port = await server.start(config.listen.host, config.listen.port)
        address = bound_address(config.listen.host, port)
        http = (
            None
            if config.http is None
            else _http_server(config.http, config.tls, generation, readiness, keys, watch, metrics)
        )
        if http is not None:
            get_logger().info("http_listening", address=http.address)
        get_logger().info("service_listening", address=address)
        async with metrics_served(metrics, config.observability.metrics), asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(scheduler.run(gateway_id=address)),
                tasks.create_task(readiness.run(lambda ready: server.set_ready(ready=ready))),
                *([tasks.create_task(keys.run())] if keys.requires_key else []),
            ]
            if http is not None:
                tasks.create_task(http.serve())
            await shutdown.wait()
            get_logger().info("draining", grace_s=shutdown.grace_s, num_requests=limit.num_requests)
            readiness.drain()
            try:
                async with asyncio.timeout(shutdown.grace_s):
                    await limit.wait_idle()
            except TimeoutError:
                get_logger().warning("drain_timed_out", num_requests=limit.num_requests)
                streams.fail_all(StatusCode.UNAVAILABLE, "the gateway is shutting down")
            watch.close()
            if http is not None:
                http.stop(_STOP_GRACE_S)
            await server.stop(_STOP_GRACE_S)
            for task in running:
                task.cancel()
    finally:
        await server.stop(0)
        await scheduler.close()
        await guidance.close()
        if tracer is not None:
            await tracer.close()


def _http_server(
    config: HttpConfig,
    tls: TlsFiles | None,
    generation: Generation,
    readiness: Readiness,
    keys: Authenticator,
    watch: MeshWatch,
    metrics: ServiceMetrics,
) -> HttpServer:
    """Listen for HTTP; what that takes is not even imported where it is off."""
    from services.gateway.http.app import build_app
    from services.gateway.http.mesh_feed import feed_routes
    from services.gateway.http.metrics import HttpMetrics, metrics_routes
    from services.gateway.http.server import HttpServer

    requests = HttpMetrics()
    metrics.add(requests)
    more_routes = [*feed_routes(watch), *metrics_routes(metrics)]
    app = build_app(config, generation, readiness, keys, more_routes, requests)
    return HttpServer(app, config.listen, tls)
