"""Scenario 38: readiness tells the truth about every process, and liveness is another question."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from services.mesh import MeshOptions
from shared.client import GatewayClient, GenerateOptions
from shared.config import EngineConfig, SchedulingConfig
from shared.errors import UnavailableError
from shared.topology import Topology
from tests.mesh.live_mesh import LiveMesh, live_mesh

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

HEARTBEAT_S = 2.0
DETECTED_S = 2 * HEARTBEAT_S + 1.0
RECOVERED_S = 60.0
ENDLESS = """
import signal

def run_for_ever(*_):
    while True:
        pass

signal.signal(signal.SIGUSR1, run_for_ever)
"""
NAMES = {"scheduler": "the scheduler", "stage 0.0": "stage 0", "stage 1.0": "stage 1"}


ENGINE = EngineConfig(
    model="synthetic:token_us=1000",
    topology=Topology(2),
    # A whole prompt in one iteration.
    scheduling=SchedulingConfig(max_batch_tokens=4096),
)
OPTIONS = MeshOptions(ENGINE, heartbeat_s=HEARTBEAT_S, grace_s=2)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def live() -> AsyncIterator[LiveMesh]:
    async with live_mesh(OPTIONS) as running:
        yield running


@pytest.mark.parametrize("name", NAMES)
async def test_a_stopped_process_is_named_in_time_and_may_go_on(live: LiveMesh, name: str) -> None:
    began = time.monotonic()
    async with live.stopped(name):
        reason = await live.health(serving=False, within_s=DETECTED_S)
        assert time.monotonic() - began < DETECTED_S
        if NAMES[name] not in reason:
            await live.not_ready_because(NAMES[name])
    await live.health(serving=True, within_s=RECOVERED_S)
    assert len(await live.generate("hello", max_tokens=3)) == 3


@pytest.mark.asyncio(loop_scope="function")
async def test_one_that_hangs_or_dies_is_named_in_time_and_may_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(ENDLESS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with live_mesh(OPTIONS) as live:
        for name, told in NAMES.items():
            live.process(name).send_signal(signal.SIGUSR1)
            await live.health(serving=False, within_s=DETECTED_S)
            await live.not_ready_because(told, within_s=DETECTED_S)
            await live.lose(name)
            await live.start_again(name)
            await live.health(serving=True, within_s=RECOVERED_S)
            assert len(await live.generate("hello", max_tokens=3)) == 3
        # One that dies is known at once; stages that do are in ``test_cases_stages``.
        await live.lose("scheduler")
        await live.health(serving=False, within_s=HEARTBEAT_S)
        await live.not_ready_because(NAMES["scheduler"], within_s=HEARTBEAT_S)


async def test_a_long_prefill_is_no_failure(live: LiveMesh) -> None:
    """An iteration of a legal prompt takes longer than the heartbeat, and longer than two."""
    before = await live.engine()
    answer = asyncio.create_task(live.generate([65] * 2500, max_tokens=2))
    while not answer.done():
        assert (await live.http.get("/ready")).status_code == 200
        assert (await live.http.get("/health")).status_code == 200
        await asyncio.wait({answer}, timeout=0.5)
    assert len(await answer) == 2
    after = await live.engine()
    assert after.epoch == before.epoch
    assert after.num_steps == before.num_steps + 2


async def test_probes_spend_no_token(live: LiveMesh) -> None:
    before = await live.engine()
    for _ in range(20):
        await live.health(serving=True)
    after = await live.engine()
    assert (before.num_steps, before.num_output_tokens) == (after.num_steps, after.num_output_tokens)


async def test_a_full_disk_for_logs_stops_nobody(live: LiveMesh) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = OPTIONS.gateway_command(live.mesh.scheduler_address)
    command[command.index("--port") + 1] = str(port)
    full = os.open("/dev/full", os.O_WRONLY)
    gateway = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, stderr=full)
    os.close(full)
    try:
        async with GatewayClient(f"127.0.0.1:{port}") as client, asyncio.timeout(RECOVERED_S):
            while True:
                with contextlib.suppress(UnavailableError):
                    if (await client.status()).engine.ready:
                        break
            deltas = [delta async for delta in client.generate("hello", GenerateOptions(max_tokens=3, ignore_eos=True))]
        assert sum(len(delta.token_ids) for delta in deltas) == 3
    finally:
        gateway.terminate()
        assert await gateway.wait() == 0
