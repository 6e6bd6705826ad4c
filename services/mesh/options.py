"""What a local mesh is started with, and the command line of each of its processes.

Every option is given explicitly, so that ``ORCA_…`` variables meant for the supervisor never reach a child by accident.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field

from shared.config import (
    DEFAULT_HEARTBEAT_S,
    EngineConfig,
    GatewayConfig,
    HttpConfig,
    ListenConfig,
    ObservabilityConfig,
    WorkerConfig,
)
from shared.errors import ConfigError
from shared.tls import TlsFiles, TlsRole, load_tls

__all__ = ["MeshOptions"]

_LOOPBACK = ListenConfig(host="127.0.0.1", port=0)
"""Only the gateway is reached from outside; all others listen at any free loopback port."""


@dataclass(frozen=True, slots=True)
class MeshOptions:
    """A mesh on this host: a scheduler, a gateway and one worker for each rank of the engine's topology."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    listen: ListenConfig = field(default_factory=ListenConfig)
    """Where the gateway serves gRPC."""
    http: HttpConfig | None = field(default_factory=lambda: HttpConfig(ListenConfig(port=0)))
    """Its HTTP front; None: gRPC only."""
    max_requests: int = 256
    """Requests that the gateway has in service at once."""
    max_queued: int = 1024
    """Requests that wait at the gateway."""
    max_queued_bytes: int = 256 << 20
    """Memory for what waits there."""
    api_keys: str = ""
    """Path of the file of API keys; empty: everybody may call."""
    tls: TlsFiles | None = None
    """What the gateway shows its clients; None: no TLS."""
    mesh_tls: TlsFiles | None = None
    """What all processes show each other: one certificate does for them, since all are on this host."""
    device: str = "auto"
    num_threads: int = 0
    """Compute threads of each worker; 0 divides the CPUs among them."""
    heartbeat_s: float = DEFAULT_HEARTBEAT_S
    """How often gateway and scheduler ask the services behind them for a sign of life."""
    grace_s: float = 10.0
    """Time that each of gateway, scheduler and workers has to drain."""
    log_level: str = "info"
    """Level at which the processes log; at least ``info``, since their addresses are learned from their logs."""
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    """The gateway serves its metrics at the port given here, the scheduler at the next one, then each worker in the
    order of world ranks; with port 0 each takes any free one."""

    def __post_init__(self) -> None:
        """Check what the services would check, before any of them is started."""
        GatewayConfig(
            scheduler="127.0.0.1:1",
            listen=self.listen,
            max_requests=self.max_requests,
            max_queued=self.max_queued,
            max_queued_bytes=self.max_queued_bytes,
            heartbeat_s=self.heartbeat_s,
        )
        WorkerConfig(scheduler="127.0.0.1:1", device=self.device, num_threads=self.num_threads)
        metrics, last = self.observability.metrics, 1 + self.engine.topology.world_size
        if metrics is not None and metrics.port + last > 65535:
            raise ConfigError(f"--metrics-port must be at most {65535 - last}: each process takes one from there on")
        if not 0 <= self.grace_s <= 86400:
            raise ConfigError(f"--grace must be between 0 and 86400 seconds, not {self.grace_s:g}")

    def check_files(self) -> None:
        """Read certificates and keys as the services would. Raises ``ConfigError``."""
        load_tls(self.tls)
        load_tls(self.mesh_tls)

    @property
    def threads_per_worker(self) -> int:
        """Compute threads of each worker."""
        num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.num_threads or max(1, num_cpus // self.engine.topology.world_size)

    def environment(self) -> dict[str, str]:
        """Environment of every process."""
        return {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(self.threads_per_worker)}

    def scheduler_command(self) -> list[str]:
        """Command line of the scheduler."""
        engine, scheduling = self.engine, self.engine.scheduling
        return [
            *self._service("scheduler", _LOOPBACK, place=1),
            *("--heartbeat", f"{self.heartbeat_s:g}"),
            *("--model", engine.model),
            *("--stages", str(engine.topology.num_stages)),
            *("--tp", str(engine.topology.tp_size)),
            *("--dtype", engine.dtype),
            *("--kv-memory", str(engine.kv_memory_bytes)),
            *("--block-size", str(engine.block_size)),
            *("--max-model-len", str(engine.max_model_len)),
            *("--collective-timeout", str(engine.collective_timeout_s)),
            *("--max-batch-size", str(scheduling.max_batch_size)),
            *("--max-waiting", str(scheduling.max_waiting)),
            *("--kv-policy", scheduling.kv_policy),
            "--chunked-prefill" if scheduling.chunked_prefill else "--no-chunked-prefill",
            *("--max-batch-tokens", str(scheduling.max_batch_tokens)),
            "--prefix-cache" if scheduling.prefix_cache else "--no-prefix-cache",
            *("--run-ahead", str(scheduling.run_ahead)),
            "--split-over-stages" if scheduling.split_over_stages else "--no-split-over-stages",
            *("--batching", scheduling.batching),
        ]

    def worker_command(self, scheduler: str, stage: int, tp_rank: int) -> list[str]:
        """Command line of one worker; ``scheduler`` is host:port."""
        return [
            *self._service("worker", _LOOPBACK, place=2 + self.engine.topology.world_rank(stage, tp_rank)),
            *("--scheduler", scheduler),
            *("--stage", str(stage)),
            *("--tp-rank", str(tp_rank)),
            *("--advertise-host", _LOOPBACK.host),
            *("--device", self.device),
            *("--threads", str(self.threads_per_worker)),
        ]

    def gateway_command(self, scheduler: str) -> list[str]:
        """Command line of the gateway; ``scheduler`` is host:port."""
        return [
            *self._service("gateway", self.listen, place=0),
            *("--scheduler", scheduler),
            *("--max-requests", str(self.max_requests)),
            *("--max-queued", str(self.max_queued)),
            *("--max-queued-bytes", str(self.max_queued_bytes)),
            *("--heartbeat", f"{self.heartbeat_s:g}"),
            *("--api-keys", self.api_keys),
            *_tls_arguments(TlsRole.PUBLIC, self.tls),
            *self._http(),
        ]

    def _http(self) -> list[str]:
        http = self.http or HttpConfig()
        return [
            *("--http-host", http.listen.host),
            *("--http-port", "off" if self.http is None else str(http.listen.port)),
            *("--max-body-bytes", str(http.max_body_bytes)),
            *("--cors-origin", ",".join(http.cors_origins)),
            *("--allowed-host", ",".join(http.allowed_hosts)),
        ]

    def _service(self, name: str, listen: ListenConfig, *, place: int) -> list[str]:
        """``place``: of this process among all that serve metrics."""
        level = "debug" if self.log_level == "debug" else "info"
        metrics = self.observability.metrics
        # -P: a folder named services or shared in the user's working directory must not be imported.
        return [
            *(sys.executable, "-P", "-m", "services.cli", name),
            "--exit-with-parent",
            *("--host", listen.host),
            *("--port", str(listen.port)),
            *("--metrics-host", _LOOPBACK.host if metrics is None else metrics.host),
            *("--metrics-port", "off" if metrics is None else str(metrics.port and metrics.port + place)),
            *("--otlp-endpoint", self.observability.otlp_endpoint),
            *_tls_arguments(TlsRole.MESH, self.mesh_tls),
            *("--grace", f"{self.grace_s:g}"),
            *("--log-level", level),
            *("--log-format", "json"),
        ]


def _tls_arguments(role: TlsRole, files: TlsFiles | None) -> list[str]:
    paths = ("", "", "") if files is None else (files.certificate, files.private_key, files.authorities)
    return [argument for pair in zip(role.value, paths, strict=True) for argument in pair]
