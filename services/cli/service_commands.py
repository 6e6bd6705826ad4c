"""``orca gateway``, ``orca scheduler`` and ``orca worker``: one service in this process."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import access_options as acc
from services.cli import options as opt
from services.cli.engine_options import takes_engine
from services.cli.http import http
from services.cli.observability import observability
from shared.config import (
    DEFAULT_HEARTBEAT_S,
    EngineConfig,
    GatewayConfig,
    HttpConfig,
    ListenConfig,
    SchedulerConfig,
    WorkerConfig,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from shared.lifecycle import Shutdown

_GATEWAY = GatewayConfig(scheduler="127.0.0.1:1")
_HTTP = HttpConfig()
_METRICS = ListenConfig()


def gateway(
    scheduler: opt.SchedulerOption,
    host: opt.HostOption = _GATEWAY.listen.host,
    port: opt.PortOption = _GATEWAY.listen.port,
    http_host: opt.HttpHostOption = "",
    http_port: opt.HttpPortOption = str(_HTTP.listen.port),
    max_body_bytes: opt.MaxBodyBytesOption = _HTTP.max_body_bytes,
    cors_origin: opt.CorsOriginOption = "",
    allowed_host: opt.AllowedHostOption = "",
    max_requests: opt.MaxRequestsOption = _GATEWAY.max_requests,
    max_queued: acc.MaxQueuedOption = _GATEWAY.max_queued,
    max_queued_bytes: acc.MaxQueuedBytesOption = _GATEWAY.max_queued_bytes,
    api_keys: acc.ApiKeysOption = "",
    tls_cert: acc.TlsCertOption = "",
    tls_key: acc.TlsKeyOption = "",
    tls_client_ca: acc.TlsClientCaOption = "",
    mesh_tls_cert: acc.MeshTlsCertOption = "",
    mesh_tls_key: acc.MeshTlsKeyOption = "",
    mesh_tls_ca: acc.MeshTlsCaOption = "",
    heartbeat: opt.HeartbeatOption = DEFAULT_HEARTBEAT_S,
    grace: opt.GraceOption = 10.0,
    metrics_host: opt.MetricsHostOption = _METRICS.host,
    metrics_port: opt.MetricsPortOption = "off",
    otlp_endpoint: opt.OtlpEndpointOption = "",
    log_level: opt.LogLevelOption = "info",
    log_format: opt.LogFormatOption = "auto",
    exit_with_parent: opt.ExitWithParentOption = False,
) -> None:
    """Run a gateway: the service that clients talk to."""
    config = GatewayConfig(
        scheduler=scheduler,
        listen=ListenConfig(host, port),
        max_requests=max_requests,
        max_queued=max_queued,
        max_queued_bytes=max_queued_bytes,
        heartbeat_s=heartbeat,
        api_keys=api_keys,
        tls=acc.public_tls(tls_cert, tls_key, tls_client_ca),
        mesh_tls=acc.mesh_tls(mesh_tls_cert, mesh_tls_key, mesh_tls_ca),
        observability=observability(metrics_host, metrics_port, otlp_endpoint),
        http=http(http_host or host, http_port, max_body_bytes, cors_origin, allowed_host),
    )
    _configure_logging(log_level, log_format, service="gateway")
    from services.gateway.app import run_gateway

    _serve(partial(run_gateway, config), grace, exit_with_parent)


@takes_engine
def scheduler(
    engine: EngineConfig,
    host: opt.HostOption = "127.0.0.1",
    port: opt.PortOption = 50052,
    mesh_tls_cert: acc.MeshTlsCertOption = "",
    mesh_tls_key: acc.MeshTlsKeyOption = "",
    mesh_tls_ca: acc.MeshTlsCaOption = "",
    heartbeat: opt.HeartbeatOption = DEFAULT_HEARTBEAT_S,
    grace: opt.GraceOption = 10.0,
    metrics_host: opt.MetricsHostOption = _METRICS.host,
    metrics_port: opt.MetricsPortOption = "off",
    otlp_endpoint: opt.OtlpEndpointOption = "",
    log_level: opt.LogLevelOption = "info",
    log_format: opt.LogFormatOption = "auto",
    exit_with_parent: opt.ExitWithParentOption = False,
) -> None:
    """Run the scheduler: it decides every iteration and owns the K/V accounting. One for each engine."""
    config = SchedulerConfig(
        listen=ListenConfig(host, port),
        engine=engine,
        heartbeat_s=heartbeat,
        mesh_tls=acc.mesh_tls(mesh_tls_cert, mesh_tls_key, mesh_tls_ca),
        observability=observability(metrics_host, metrics_port, otlp_endpoint),
    )
    _configure_logging(log_level, log_format, service="scheduler")
    from services.scheduler.app import run_scheduler

    _serve(partial(run_scheduler, config), grace, exit_with_parent)


def worker(
    scheduler: opt.SchedulerOption,
    stage: Annotated[int, typer.Option("--stage", envvar="ORCA_STAGE", help="Pipeline stage of this worker.")] = 0,
    tp_rank: Annotated[
        int, typer.Option("--tp-rank", envvar="ORCA_TP_RANK", help="Tensor-parallel rank within the stage.")
    ] = 0,
    device: opt.DeviceOption = "auto",
    threads: opt.ThreadsOption = 0,
    host: opt.HostOption = "127.0.0.1",
    port: opt.PortOption = 0,
    advertise_host: Annotated[
        str,
        typer.Option(
            "--advertise-host",
            envvar="ORCA_ADVERTISE_HOST",
            show_default="the one of --host",
            help="Host name under which the scheduler and other workers reach this one.",
        ),
    ] = "",
    mesh_tls_cert: acc.MeshTlsCertOption = "",
    mesh_tls_key: acc.MeshTlsKeyOption = "",
    mesh_tls_ca: acc.MeshTlsCaOption = "",
    grace: opt.GraceOption = 10.0,
    metrics_host: opt.MetricsHostOption = _METRICS.host,
    metrics_port: opt.MetricsPortOption = "off",
    otlp_endpoint: opt.OtlpEndpointOption = "",
    log_level: opt.LogLevelOption = "info",
    log_format: opt.LogFormatOption = "auto",
    exit_with_parent: opt.ExitWithParentOption = False,
) -> None:
    """Run a worker: one pipeline stage and tensor-parallel rank of the model. The model is the scheduler's to name."""
    config = WorkerConfig(
        scheduler=scheduler,
        stage=stage,
        tp_rank=tp_rank,
        listen=ListenConfig(host, port),
        advertise_host=advertise_host,
        device=device,
        num_threads=threads,
        mesh_tls=acc.mesh_tls(mesh_tls_cert, mesh_tls_key, mesh_tls_ca),
        observability=observability(metrics_host, metrics_port, otlp_endpoint),
    )
    _configure_logging(log_level, log_format, service="worker", stage=stage, tp_rank=tp_rank)
    from services.worker.app import run_worker

    _serve(partial(run_worker, config), grace, exit_with_parent)


def _configure_logging(level: str, log_format: str, **bound: object) -> None:
    from shared.log import configure_logging

    configure_logging(level, json=None if log_format == "auto" else log_format == "json", **bound)


def _serve(run: "Callable[[Shutdown], Awaitable[None]]", grace_s: float, exit_with_parent: bool) -> None:
    from shared.lifecycle import run_service

    run_service(run, grace_s=grace_s, exit_with_parent=exit_with_parent)
