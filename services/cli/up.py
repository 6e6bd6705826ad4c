"""``orca up``: a whole mesh on this host, in the foreground."""

import asyncio
import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import access_options as acc
from services.cli import options as opt
from services.cli.client_access import ClientAccess
from services.cli.engine_options import takes_engine
from services.cli.http import http
from services.cli.observability import observability
from shared.config import DEFAULT_HEARTBEAT_S, EngineConfig, GatewayConfig, HttpConfig, ListenConfig

if TYPE_CHECKING:
    from services.cli.mesh_view import MeshView
    from services.mesh import LocalMesh, MeshOptions, ServiceExit

__all__ = ["up"]

_GATEWAY = GatewayConfig(scheduler="127.0.0.1:1")
_HTTP = HttpConfig()
_GRACE_AFTER_FAILURE_S = 0.0
"""Once a process is lost no request can end well: the others get what it takes to leave, no more."""


@takes_engine
def up(
    engine: EngineConfig,
    device: opt.DeviceOption = "auto",
    threads: opt.ThreadsOption = 0,
    host: opt.HostOption = _GATEWAY.listen.host,
    grpc_port: Annotated[
        int,
        typer.Option(
            "--grpc-port",
            envvar="ORCA_GRPC_PORT",
            min=0,
            max=65535,
            rich_help_panel="Process",
            help="Port that gRPC clients call; 0 takes any free one.",
        ),
    ] = _GATEWAY.listen.port,
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
    metrics_host: opt.MetricsHostOption = "127.0.0.1",
    metrics_port: Annotated[
        str,
        typer.Option(
            "--metrics-port",
            envvar="ORCA_METRICS_PORT",
            metavar="PORT|off",
            rich_help_panel="Process",
            help="Ports at which Prometheus may scrape /metrics: this one of the gateway, the next of the scheduler, "
            "then one for each worker; 0 takes any free ones, which --log-level info tells.",
        ),
    ] = "off",
    otlp_endpoint: opt.OtlpEndpointOption = "",
    log_level: opt.LogLevelOption = "info",
) -> None:
    """Start a whole mesh on this host: scheduler, workers and gateway. Ctrl-C drains and stops it.

    A catalogue model that is not here yet is fetched first.
    """
    from rich.console import Console

    from services.cli.mesh_view import MeshView
    from services.cli.models import make_available
    from services.mesh import MeshOptions
    from services.mesh.local_mesh import worker_name
    from services.mesh.ports import check_port

    options = MeshOptions(
        engine=engine,
        listen=ListenConfig(host, grpc_port),
        http=http(http_host or host, http_port, max_body_bytes, cors_origin, allowed_host),
        max_requests=max_requests,
        max_queued=max_queued,
        max_queued_bytes=max_queued_bytes,
        api_keys=api_keys,
        tls=acc.public_tls(tls_cert, tls_key, tls_client_ca),
        mesh_tls=acc.mesh_tls(mesh_tls_cert, mesh_tls_key, mesh_tls_ca),
        device=device,
        num_threads=threads,
        heartbeat_s=heartbeat,
        grace_s=grace,
        log_level=log_level,
        observability=observability(metrics_host, metrics_port, otlp_endpoint),
    )
    options.check_files()
    check_port(host, grpc_port, option="--grpc-port")
    if options.http is not None:
        check_port(options.http.listen.host, options.http.listen.port, option="--http-port")
    console = Console()
    make_available(engine.model, console)
    names = ["scheduler", "gateway", *(worker_name(*rank) for rank in engine.topology.ranks())]
    raise typer.Exit(asyncio.run(_supervise(options, MeshView(console, names, log_level))))


async def _supervise(options: "MeshOptions", view: "MeshView") -> int:
    """Run the mesh until a signal asks to leave or a process ends; the exit code is returned."""
    from services.mesh import LocalMesh, MeshError

    mesh = LocalMesh(options, view.take)
    asked: list[signal.Signals] = []
    leave = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        asked.append(number)
        leave.set()
        if len(asked) > 1:
            mesh.kill_nowait()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    serving = asyncio.create_task(_serve(mesh, view))
    leaving = asyncio.create_task(leave.wait())
    has_failed = False
    try:
        await asyncio.wait([serving, leaving], return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            view.stop_waiting()
            view.say("draining; Ctrl-C again stops at once")
        else:
            has_failed = True
            view.failed(await serving)
    except MeshError as error:
        if error.exit is None:
            raise
        view.failed(error.exit)
    finally:
        view.stop_waiting()
        serving.cancel()
        leaving.cancel()
        await asyncio.wait([serving, leaving])
        await mesh.stop(_GRACE_AFTER_FAILURE_S if has_failed else None)
    view.say("stopped")
    if has_failed:
        return 1
    return 0 if len(asked) == 1 else 128 + asked[-1]


def _client_access(options: "MeshOptions") -> ClientAccess:
    tls = options.tls
    return ClientAccess(bool(options.api_keys), tls is not None, tls is not None and bool(tls.authorities))


async def _serve(mesh: "LocalMesh", view: "MeshView") -> "ServiceExit":
    topology = mesh.options.engine.topology
    started = time.monotonic()
    view.start(f"starting {mesh.options.engine.model} on {topology.num_stages} × {topology.tp_size} workers")
    await mesh.start()
    engine = await mesh.wait_ready()
    view.ready(
        mesh.gateway_address, mesh.http_address, engine, time.monotonic() - started, _client_access(mesh.options)
    )
    return await mesh.first_exit()
