"""What each service is started with: one frozen dataclass a concern, valid by construction.

The command line (``services.cli``) builds them from options and ``ORCA_…`` environment variables; each service gets its
own piece only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared.errors import ConfigError
from shared.topology import Topology

if TYPE_CHECKING:
    from shared.tls import TlsFiles

__all__ = [
    "DEFAULT_HEARTBEAT_S",
    "DEFAULT_MODEL",
    "EngineConfig",
    "GatewayConfig",
    "HttpConfig",
    "ListenConfig",
    "ObservabilityConfig",
    "SchedulerConfig",
    "SchedulingConfig",
    "WorkerConfig",
    "check_address",
]

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_HEARTBEAT_S = 5.0
DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
KV_POLICIES = ("paged", "reserve")
BATCHINGS = ("iteration", "request")
DEVICES = ("auto", "cpu", "cuda")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"--{name} must be between {low} and {high}, not {value}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"--{name} must be one of {', '.join(choices)}, not {value!r}")


def _check_heartbeat(heartbeat_s: float) -> None:
    _check_range("heartbeat", heartbeat_s, 0.1, 3600)


def check_address(name: str, address: str) -> None:
    """Raise ``ConfigError`` for what is not HOST:PORT; ``name`` is the option's."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--{name} must be HOST:PORT, not {address!r}")


@dataclass(frozen=True, slots=True)
class ListenConfig:
    """Where a service listens."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes any free port."""

    def __post_init__(self) -> None:
        """Check ranges."""
        _check_range("port", self.port, 0, 65535)
        if not self.host:
            raise ConfigError("--host must not be empty; 127.0.0.1 is this host only, 0.0.0.0 is every interface")


@dataclass(frozen=True, slots=True)
class ObservabilityConfig:
    """What a service tells about itself, beside its log."""

    metrics: ListenConfig | None = None
    """Where Prometheus may scrape ``/metrics``; None: nowhere."""
    otlp_endpoint: str = ""
    """Base URL of an OpenTelemetry collector that takes spans by OTLP over HTTP; empty: no traces."""

    def __post_init__(self) -> None:
        """Check the URL."""
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"--otlp-endpoint must be a URL like http://127.0.0.1:4318, not {self.otlp_endpoint!r}")


@dataclass(frozen=True, slots=True)
class SchedulingConfig:
    """How iterations are chosen. ``kv_policy`` "reserve" without chunked prefill is ORCA's Algorithm 1 as it stands."""

    max_batch_size: int = 64
    """Requests in one iteration at most (``max_bs`` of ORCA's Algorithm 1)."""
    max_waiting: int = 4096
    """Requests that may wait; one more is refused with RESOURCE_EXHAUSTED."""
    kv_policy: str = "paged"
    """"reserve" takes all blocks a request can ever need at its start, "paged" takes them on demand and preempts."""
    chunked_prefill: bool = True
    """Split prompts so that no iteration has more than ``max_batch_tokens``."""
    max_batch_tokens: int = 512
    """Tokens in one iteration at most, with chunked prefill; at least ``max_batch_size``."""
    prefix_cache: bool = True
    """Find the K/V of prompt beginnings that were computed before."""
    run_ahead: int = 1
    """With one stage: iterations sent before the tokens of the one before are back."""
    split_over_stages: bool = True
    """With few requests and several stages, give every stage its part of them."""
    batching: str = "iteration"
    """"request" is the baseline: a batch stays as it is until its last member has ended."""

    def __post_init__(self) -> None:
        """Check ranges and what goes together."""
        _check_range("max-batch-size", self.max_batch_size, 1, 65536)
        _check_range("max-waiting", self.max_waiting, 1, 1 << 24)
        _check_choice("kv-policy", self.kv_policy, KV_POLICIES)
        _check_choice("batching", self.batching, BATCHINGS)
        _check_range("max-batch-tokens", self.max_batch_tokens, 1, 1 << 24)
        _check_range("run-ahead", self.run_ahead, 0, 16)
        if self.chunked_prefill and self.max_batch_tokens < self.max_batch_size:
            raise ConfigError(
                f"--max-batch-tokens ({self.max_batch_tokens}) must be at least --max-batch-size "
                f"({self.max_batch_size}): every request of an iteration has a token in it"
            )
        if self.batching == "request" and (self.kv_policy != "reserve" or self.chunked_prefill or self.run_ahead):
            raise ConfigError(
                "--batching request needs --kv-policy reserve, --no-chunked-prefill and --run-ahead 0: "
                "the baseline has none of what goes beyond it"
            )

    @property
    def token_budget(self) -> int | None:
        """Tokens in one iteration at most; None without chunked prefill."""
        return self.max_batch_tokens if self.chunked_prefill else None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine: one model on one mesh of workers, and how iterations are chosen."""

    model: str = DEFAULT_MODEL
    topology: Topology = field(default_factory=Topology)
    dtype: str = "auto"
    """"auto" is bfloat16 on GPUs and int8, which is quantised weights, or float32 on CPUs."""
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    kv_memory_bytes: int = 1 << 30
    """Memory for K/V on each worker; the number of slots of Algorithm 1 follows from it."""
    block_size: int = 16
    """Tokens in one K/V block."""
    max_model_len: int = 0
    """Longest sequence, prompt and output, in tokens, at least 2; 0 takes the model's own limit."""
    collective_timeout_s: int = 60
    """A collective or an activation that takes longer is taken for lost."""

    @property
    def run_ahead(self) -> int:
        """Iterations ahead: only one stage can, since only there the worker that samples is the one that embeds."""
        return self.scheduling.run_ahead if self.topology.num_stages == 1 else 0

    @property
    def workers_append_tokens(self) -> bool:
        """Whether workers keep the tokens that they sample, rather than being told."""
        return self.run_ahead > 0

    def __post_init__(self) -> None:
        """Check ranges."""
        if not self.model:
            raise ConfigError("--model must not be empty")
        _check_choice("dtype", self.dtype, DTYPES)
        _check_range("kv-memory", self.kv_memory_bytes, 1 << 10, 1 << 44)
        _check_range("block-size", self.block_size, 1, 1024)
        _check_range("max-model-len", self.max_model_len, 0, 1 << 24)
        if self.max_model_len == 1:
            raise ConfigError(
                "--max-model-len must be at least 2, a token of prompt and one of output; 0 takes the model's own limit"
            )
        _check_range("collective-timeout", self.collective_timeout_s, 1, 86400)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The scheduler service."""

    listen: ListenConfig = field(default_factory=ListenConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    heartbeat_s: float = DEFAULT_HEARTBEAT_S
    """How often workers are asked for a sign of life, and how long they may take to give it."""
    mesh_tls: TlsFiles | None = None
    """TLS between the services, both ends checked; None: in the clear."""
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)

    def __post_init__(self) -> None:
        """Check ranges."""
        _check_heartbeat(self.heartbeat_s)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker."""

    scheduler: str
    """host:port of the scheduler."""
    stage: int = 0
    tp_rank: int = 0
    listen: ListenConfig = field(default_factory=ListenConfig)
    advertise_host: str = ""
    """Host name under which the scheduler and other workers reach this one; empty: the one it listens at."""
    device: str = "auto"
    """"auto" is CUDA where there is a GPU."""
    num_threads: int = 0
    """Compute threads; 0 leaves the choice to torch."""
    mesh_tls: TlsFiles | None = None
    """TLS between the services, both ends checked; None: in the clear."""
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)

    def __post_init__(self) -> None:
        """Check ranges."""
        check_address("scheduler", self.scheduler)
        _check_range("stage", self.stage, 0, 1023)
        _check_range("tp-rank", self.tp_rank, 0, 1023)
        _check_choice("device", self.device, DEVICES)
        _check_range("threads", self.num_threads, 0, 1024)
        if not self.advertise_host and self.listen.host in {"0.0.0.0", "::"}:  # noqa: S104 - compared, not bound
            raise ConfigError(
                "--advertise-host is needed when --host is every interface: others must know a name to call"
            )


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The HTTP front of a gateway, beside its gRPC front."""

    listen: ListenConfig = field(default_factory=lambda: ListenConfig(port=8000))
    max_body_bytes: int = 8 << 20
    """Largest body of a request."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call from a browser, like https://example.org; "*" is every one. None by default."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which a gateway that listens on the loopback address and has no keys may be called, beside localhost."""

    def __post_init__(self) -> None:
        """Check ranges and the form of origins and names."""
        _check_range("max-body-bytes", self.max_body_bytes, 1 << 10, 1 << 30)
        for origin in self.cors_origins:
            scheme, _, host = origin.partition("://")
            if origin != "*" and (scheme not in {"http", "https"} or not host or "/" in host):
                raise ConfigError(f"--cors-origin must be * or like https://example.org (no path), not {origin!r}")
        for name in self.allowed_hosts:
            if not name or set(name) & set("/:*@ "):
                raise ConfigError(f"--allowed-host must be names like gateway.example (no port), not {name!r}")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """One gateway."""

    scheduler: str
    """host:port of the scheduler."""
    listen: ListenConfig = field(default_factory=lambda: ListenConfig(port=50051))
    max_requests: int = 256
    """Requests in service at once, choices counted: with the scheduler, which serves in order of arrival."""
    max_queued: int = 1024
    """Requests that wait before it, in fair shares between clients; one more is refused with RESOURCE_EXHAUSTED."""
    max_queued_bytes: int = 256 << 20
    """Memory for what waits."""
    heartbeat_s: float = DEFAULT_HEARTBEAT_S
    """How often the scheduler is asked for a sign of life, and how long it may take to give it."""
    api_keys: str = ""
    """Path of the file of API keys (`services.gateway.key_file`); empty: everybody may call."""
    tls: TlsFiles | None = None
    """TLS towards clients; None: in the clear."""
    mesh_tls: TlsFiles | None = None
    """TLS towards the scheduler, both ends checked; None: in the clear."""
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    http: HttpConfig | None = None
    """The OpenAI-compatible front; None: gRPC only."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_address("scheduler", self.scheduler)
        _check_range("max-requests", self.max_requests, 1, 1 << 20)
        _check_range("max-queued", self.max_queued, 0, 1 << 20)
        _check_range("max-queued-bytes", self.max_queued_bytes, 0, 1 << 40)
        _check_heartbeat(self.heartbeat_s)
