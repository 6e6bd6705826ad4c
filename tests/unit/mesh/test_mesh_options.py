from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import typer.main

from services.cli.main import app
from services.mesh import MeshOptions, ServiceExit
from services.mesh.ports import dial_address, dial_url
from shared.config import EngineConfig, HttpConfig, ListenConfig, ObservabilityConfig, SchedulingConfig
from shared.errors import ConfigError
from shared.tls import TlsFiles, TlsRole
from shared.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Sequence

OPTIONS = MeshOptions(
    engine=EngineConfig(
        model="synthetic:step_ms=1",
        topology=Topology(2, 3),
        dtype="float32",
        kv_memory_bytes=3 << 20,
        block_size=8,
        max_model_len=512,
        collective_timeout_s=9,
        scheduling=SchedulingConfig(
            max_batch_size=5,
            max_waiting=7,
            kv_policy="reserve",
            chunked_prefill=False,
            max_batch_tokens=64,
            prefix_cache=False,
            run_ahead=0,
            split_over_stages=False,
            batching="request",
        ),
    ),
    listen=ListenConfig("0.0.0.0", 1234),
    http=HttpConfig(
        ListenConfig("127.0.0.2", 4321),
        5000,
        cors_origins=("https://a.example", "https://b.example"),
        allowed_hosts=("c.example", "d.example"),
    ),
    max_requests=11,
    max_queued=12,
    max_queued_bytes=13,
    api_keys="keys",
    tls=TlsFiles("public.crt", "public.key", "clients.pem", TlsRole.PUBLIC),
    mesh_tls=TlsFiles("mesh.crt", "mesh.key", "mesh.pem", TlsRole.MESH),
    device="cpu",
    num_threads=2,
    heartbeat_s=2.5,
    grace_s=1.5,
    log_level="debug",
    observability=ObservabilityConfig(ListenConfig("0.0.0.0", 9400), "http://collector:4318"),
)


def parsed(command: Sequence[str]) -> dict[str, Any]:
    """What the real parser makes of a child's command line; every option must have been given."""
    python, flags, (name, *arguments) = command[0], command[1:4], command[4:]
    assert python.endswith(("python", "python3", "python3.11", "python3.12", "python3.13"))
    assert flags == ["-P", "-m", "services.cli"]
    root: Any = typer.main.get_command(app)
    context = root.commands[name].make_context(name, list(arguments))
    not_given = [key for key in context.params if context.get_parameter_source(key).name != "COMMANDLINE"]
    assert not not_given, f"left to environment variables or defaults: {not_given}"
    params: dict[str, Any] = context.params
    common = {"grace": 1.5, "log_level": "debug", "log_format": "json", "exit_with_parent": True}
    common |= {"metrics_host": "0.0.0.0", "otlp_endpoint": "http://collector:4318"}
    common |= {"mesh_tls_cert": "mesh.crt", "mesh_tls_key": "mesh.key", "mesh_tls_ca": "mesh.pem"}
    assert {key: params.pop(key) for key in common} == common
    return params


def test_the_scheduler_gets_the_engine() -> None:
    assert parsed(OPTIONS.scheduler_command()) == {
        "model": "synthetic:step_ms=1",
        "stages": 2,
        "tp": 3,
        "dtype": "float32",
        "max_batch_size": 5,
        "kv_memory": 3 << 20,
        "block_size": 8,
        "max_model_len": 512,
        "max_waiting": 7,
        "collective_timeout": 9,
        "heartbeat": 2.5,
        "kv_policy": "reserve",
        "chunked_prefill": False,
        "max_batch_tokens": 64,
        "prefix_cache": False,
        "run_ahead": 0,
        "split_over_stages": False,
        "batching": "request",
        "metrics_port": "9401",
        "host": "127.0.0.1",
        "port": 0,
    }


def test_a_worker_gets_its_rank() -> None:
    assert parsed(OPTIONS.worker_command("127.0.0.1:99", 1, 2)) == {
        "scheduler": "127.0.0.1:99",
        "stage": 1,
        "tp_rank": 2,
        "device": "cpu",
        "threads": 2,
        "host": "127.0.0.1",
        "port": 0,
        "advertise_host": "127.0.0.1",
        "metrics_port": "9407",
    }


def test_only_the_gateway_listens_outside() -> None:
    assert parsed(OPTIONS.gateway_command("127.0.0.1:99")) == {
        "scheduler": "127.0.0.1:99",
        "host": "0.0.0.0",
        "port": 1234,
        "max_requests": 11,
        "max_queued": 12,
        "max_queued_bytes": 13,
        "heartbeat": 2.5,
        "api_keys": "keys",
        "tls_cert": "public.crt",
        "tls_key": "public.key",
        "tls_client_ca": "clients.pem",
        "metrics_port": "9400",
        "http_host": "127.0.0.2",
        "http_port": "4321",
        "max_body_bytes": 5000,
        "cors_origin": "https://a.example,https://b.example",
        "allowed_host": "c.example,d.example",
    }


def test_http_is_off_or_at_any_port() -> None:
    assert parsed(replace(OPTIONS, http=None).gateway_command("127.0.0.1:99"))["http_port"] == "off"
    any_port = replace(OPTIONS, http=MeshOptions().http)
    assert parsed(any_port.gateway_command("127.0.0.1:99"))["http_port"] == "0"


@pytest.mark.parametrize(("port", "told"), [(None, "off"), (0, "0")])
def test_metrics_are_off_or_at_any_port(port: int | None, told: str) -> None:
    metrics = None if port is None else ListenConfig(port=port)
    command = MeshOptions(observability=ObservabilityConfig(metrics)).worker_command("127.0.0.1:99", 0, 0)
    assert command[command.index("--metrics-port") + 1] == told


def test_workers_share_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    for workers, threads in ((1, 8), (3, 2), (8, 1), (20, 1)):
        options = MeshOptions(EngineConfig(topology=Topology(workers, 1)))
        assert options.environment()["OMP_NUM_THREADS"] == str(threads)
    assert MeshOptions(num_threads=5).environment()["OMP_NUM_THREADS"] == "5"


def test_quiet_supervisors_still_learn_addresses() -> None:
    command = MeshOptions(log_level="error").scheduler_command()
    assert command[command.index("--log-level") + 1] == "info"


@pytest.mark.parametrize(
    "options",
    [
        {"device": "tpu"},
        {"num_threads": -1},
        {"grace_s": -1.0},
        {"grace_s": float("nan")},
        {"max_requests": 0},
        {"observability": ObservabilityConfig(ListenConfig(port=65535))},
    ],
)
def test_what_a_service_would_refuse_is_refused_before(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        MeshOptions(**options)


@pytest.mark.parametrize(
    ("listens_at", "called_at"),
    [
        ("127.0.0.1:1", "127.0.0.1:1"),
        ("0.0.0.0:1", "127.0.0.1:1"),
        ("[::]:1", "[::1]:1"),
        ("[::1]:1", "[::1]:1"),
        ("node-7:1", "node-7:1"),
    ],
)
def test_every_interface_is_called_by_loopback(listens_at: str, called_at: str) -> None:
    assert dial_address(listens_at) == called_at
    assert dial_url(f"https://{listens_at}") == f"https://{called_at}"


def test_no_http_has_no_url() -> None:
    assert not dial_url("")


@pytest.mark.parametrize(
    ("returncode", "reason", "summary"),
    [
        (0, "", "gateway exited with code 0"),
        (1, "no such model", "gateway exited with code 1: no such model"),
        (-9, "", "gateway was killed by SIGKILL"),
        (-40, "", "gateway was killed by signal 40"),
    ],
)
def test_how_a_service_ended_in_words(returncode: int, reason: str, summary: str) -> None:
    assert ServiceExit("gateway", returncode, reason, ()).summary == summary
