"""Scenario 32: who is in the batch is decided in one place, whatever a stage's clock says and however late it hears."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from services.mesh import LocalMesh, MeshOptions
from shared.client import GenerateOptions
from shared.config import EngineConfig, SchedulingConfig
from shared.errors import DeadlineExceededError
from shared.topology import Topology
from tests.mesh.live_mesh import LiveMesh, clients_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.mesh import LogLine

pytestmark = pytest.mark.slow

NUM_REQUESTS = 150
NUM_AT_ONCE = 24
LONGEST_DELAY_S = 0.05
SKEW_S = 100_000
SENTENCE = b"the quick brown fox jumps over the lazy dog "
BEHIND, IN_FRONT = "127.0.0.2", "127.0.0.3"
"""Where the late stage listens, and where others find it: at a proxy that takes its time."""


@dataclass(frozen=True, slots=True)
class LateStage(MeshOptions):
    """The last stage lives in another time, and behind a proxy."""

    def worker_command(self, scheduler: str, stage: int, tp_rank: int) -> list[str]:
        command = MeshOptions.worker_command(self, scheduler, stage, tp_rank)
        if stage == 0:
            return command
        command[command.index("--host") + 1] = BEHIND
        command[command.index("--advertise-host") + 1] = IN_FRONT
        return [*another_time(), *command]


def another_time() -> list[str]:
    """What starts a process whose monotonic clock is another one, where that can be had."""
    command = ["unshare", "--time", "--monotonic", str(SKEW_S), "--fork", "--kill-child"]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return command


@contextlib.asynccontextmanager
async def proxy(port: int) -> AsyncIterator[None]:
    """Pass on what comes, in order, each piece after a delay of its own."""
    chosen = random.Random(32)
    never = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(chosen.uniform(0, LONGEST_DELAY_S)):
                    await never.wait()
            writer.write(data)
            await writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            behind_reader, behind_writer = await asyncio.open_connection(BEHIND, port)
            try:
                pumps = [
                    asyncio.create_task(pump(reader, behind_writer)),
                    asyncio.create_task(pump(behind_reader, writer)),
                ]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for each in pumps:
                        each.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
            finally:
                behind_writer.close()
                writer.close()

    async with await asyncio.start_server(serve, IN_FRONT, port):
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def ask(live: LiveMesh, seed: int) -> str:
    """One request of random size that may have a short deadline or a client that soon loses interest."""
    chosen = random.Random(seed)
    num_prompt, max_tokens = chosen.randrange(1, 60), chosen.randrange(1, 16)
    patience_s = chosen.choice([None, None, chosen.uniform(0.01, 0.3)])
    options = GenerateOptions(max_tokens=max_tokens, ignore_eos=True, timeout_s=patience_s if seed % 2 else None)
    tokens: list[int] = []
    outcome = "whole"
    try:
        async with asyncio.timeout(None if seed % 2 else patience_s):
            async with contextlib.aclosing(live.client.generate([65] * num_prompt, options)) as deltas:
                async for delta in deltas:
                    tokens += delta.token_ids
    except (DeadlineExceededError, TimeoutError):
        outcome = "cut"
    expected = [SENTENCE[position % len(SENTENCE)] for position in range(num_prompt, num_prompt + max_tokens)]
    assert tokens == (expected if outcome == "whole" else expected[: len(tokens)])
    return outcome


async def test_stages_agree_however_late_one_hears_and_whatever_its_clock_says() -> None:
    scheduling = SchedulingConfig(max_batch_size=8, max_batch_tokens=64)
    engine = EngineConfig(model="synthetic:step_ms=1", topology=Topology(2), scheduling=scheduling)
    lines: list[LogLine] = []
    mesh = LocalMesh(LateStage(engine, grace_s=0.2), lines.append)
    await mesh.start()
    try:
        port = int(mesh.worker_addresses[1, 0].rpartition(":")[2])
        async with proxy(port):
            await mesh.wait_ready()
            async with clients_of(mesh, lines) as live:
                places = asyncio.Semaphore(NUM_AT_ONCE)

                async def one(seed: int) -> str:
                    async with places:
                        return await ask(live, seed)

                outcomes = await asyncio.gather(*(one(seed) for seed in range(NUM_REQUESTS)))
                await live.idle()
                assert outcomes.count("whole") > NUM_REQUESTS / 2
                assert outcomes.count("cut") > NUM_REQUESTS / 20
                lost = [line.text for line in lines if line.event == "engine_lost"]
                unreachable = [text for text in lost if "Can the scheduler reach" in text]  # before the proxy was there
                assert lost == unreachable, "no step was refused, and no stage acted by itself"
    finally:
        await mesh.kill()
