from __future__ import annotations

import asyncio
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from shared.config import (
    EngineConfig,
    GatewayConfig,
    HttpConfig,
    ListenConfig,
    SchedulerConfig,
    SchedulingConfig,
    WorkerConfig,
)
from shared.lifecycle import Shutdown
from shared.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.cli.conftest import Outcome  # only for the type checker


class Started:
    """What a command would have run, and how."""

    config: Any
    logging: dict[str, Any]
    grace_s: float
    exit_with_parent: bool


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Stand in for the services and for the life of their process."""
    seen = Started()
    for name in ("gateway", "scheduler", "worker"):

        async def run(config: object, shutdown: Shutdown) -> None:
            seen.config = config

        module = ModuleType(f"services.{name}.app")
        setattr(module, f"run_{name}", run)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def run_service(service: Any, *, grace_s: float, exit_with_parent: bool) -> None:
        seen.grace_s, seen.exit_with_parent = grace_s, exit_with_parent
        asyncio.run(service(Shutdown(grace_s)))
        raise SystemExit(7)

    def configure_logging(level: str, *, json: bool | None, **bound: object) -> None:
        seen.logging = {"level": level, "json": json, **bound}

    monkeypatch.setattr("shared.lifecycle.run_service", run_service)
    monkeypatch.setattr("shared.log.configure_logging", configure_logging)
    return seen


def test_gateway_by_options(orca: Callable[..., Outcome], started: Started) -> None:
    outcome = orca(
        "gateway", "--scheduler", "s:1", "--host", "::", "--port", "0", "--max-requests", "3", "--grace", "2"
    )
    assert outcome.exit_code == 7, "the service's exit code is the process's"
    assert started.config == GatewayConfig("s:1", ListenConfig("::", 0), 3, http=HttpConfig(ListenConfig("::", 8000)))
    assert started.grace_s == 2
    assert started.exit_with_parent is False
    assert started.logging == {"level": "info", "json": None, "service": "gateway"}


def test_gateway_over_http(orca: Callable[..., Outcome], started: Started) -> None:
    origins = ("--cors-origin", "https://a.example,*", "--allowed-host", "a.example,b.example")
    orca("gateway", "--scheduler", "s:1", "--http-host", "h", "--http-port", "0", "--max-body-bytes", "4096", *origins)
    names = ("a.example", "b.example")
    assert started.config.http == HttpConfig(ListenConfig("h", 0), 4096, ("https://a.example", "*"), names)
    orca("gateway", "--scheduler", "s:1", "--http-port", "off")
    assert started.config.http is None


@pytest.mark.parametrize(
    "bad",
    [
        *(("--http-port", "many"), ("--http-port", "65536"), ("--max-body-bytes", "1"), ("--cors-origin", "a.example")),
        *(("--allowed-host", "a.example:8000"), ("--allowed-host", "a.example,,b.example"), ("--allowed-host", "*")),
    ],
)
def test_bad_http_options_are_explained(orca: Callable[..., Outcome], started: Started, bad: tuple[str, str]) -> None:
    outcome = orca("gateway", "--scheduler", "s:1", *bad)
    assert outcome.exit_code == 2
    assert bad[0] in outcome.err


def test_gateway_by_environment(
    orca: Callable[..., Outcome], started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "SCHEDULER": "s:2",
        "HOST": "h",
        "PORT": "9",
        "MAX_REQUESTS": "4",
        "LOG_LEVEL": "debug",
        "LOG_FORMAT": "json",
    }
    for name, value in values.items():
        monkeypatch.setenv(f"ORCA_{name}", value)
    orca("gateway")
    assert started.config == GatewayConfig("s:2", ListenConfig("h", 9), 4, http=HttpConfig(ListenConfig("h", 8000)))
    assert started.logging == {"level": "debug", "json": True, "service": "gateway"}


def test_defaults_are_those_of_the_configuration(orca: Callable[..., Outcome], started: Started) -> None:
    orca("gateway", "--scheduler", "s:1")
    assert started.config == GatewayConfig("s:1", http=HttpConfig())
    orca("scheduler")
    assert started.config == SchedulerConfig(ListenConfig(port=50052), EngineConfig())
    orca("worker", "--scheduler", "s:1")
    assert started.config == WorkerConfig("s:1")


def test_scheduler(orca: Callable[..., Outcome], started: Started) -> None:
    engine = ("--model", "random:tiny", "--stages", "2", "--tp", "4", "--dtype", "bfloat16", "--max-batch-size", "8")
    sizes = ("--kv-memory", "64MiB", "--block-size", "32", "--max-model-len", "99", "--max-waiting", "5")
    orca("scheduler", *engine, *sizes, "--collective-timeout", "7", "--log-format", "pretty", "--exit-with-parent")
    assert started.config.engine == EngineConfig(
        model="random:tiny",
        topology=Topology(2, 4),
        dtype="bfloat16",
        kv_memory_bytes=64 << 20,
        block_size=32,
        max_model_len=99,
        collective_timeout_s=7,
        scheduling=SchedulingConfig(max_batch_size=8, max_waiting=5),
    )
    assert started.exit_with_parent is True
    assert started.logging == {"level": "info", "json": False, "service": "scheduler"}


def test_scheduling_switches(orca: Callable[..., Outcome], started: Started) -> None:
    orca("scheduler", "--kv-policy", "reserve", "--no-chunked-prefill", "--no-prefix-cache", "--run-ahead", "0")
    assert started.config.engine.scheduling == SchedulingConfig(
        kv_policy="reserve", chunked_prefill=False, prefix_cache=False, run_ahead=0
    )
    orca("scheduler", "--max-batch-tokens", "140", "--no-split-over-stages")
    assert started.config.engine.scheduling == SchedulingConfig(max_batch_tokens=140, split_over_stages=False)


def test_worker(orca: Callable[..., Outcome], started: Started) -> None:
    rank = ("--scheduler", "s:1", "--stage", "1", "--tp-rank", "2", "--device", "cpu", "--threads", "3")
    orca("worker", *rank, "--host", "0.0.0.0", "--port", "80", "--advertise-host", "w1")
    assert started.config == WorkerConfig("s:1", 1, 2, ListenConfig("0.0.0.0", 80), "w1", "cpu", 3)
    assert started.logging == {"level": "info", "json": None, "service": "worker", "stage": 1, "tp_rank": 2}
