"""The gateway as a process of its own: small, without torch, and gone on SIGTERM."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from shared.client import GatewayClient, GenerateOptions
from shared.errors import OrcaError
from shared.messages import FinishReason
from shared.model.store import resolve
from tests.fakes.fake_scheduler import ENGINE, FakeScheduler

if TYPE_CHECKING:
    from shared.messages import EngineInfo

ROOT = Path(__file__).parents[3]
MAX_RESIDENT_BYTES = 300 << 20
SMOLLM2 = "smollm2-135m-instruct"


def test_importing_the_gateway_imports_no_torch() -> None:
    code = (
        "import sys, services.gateway.app, services.gateway.__main__, shared.client\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheduler", "nowhere"], "--scheduler must be HOST:PORT"),
        (["--scheduler", "127.0.0.1:1", "--max-requests", "0"], "--max-requests must be between 1 and"),
    ],
)
def test_bad_options_are_explained(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "services.gateway", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


async def test_it_starts_small_serves_and_leaves_on_sigterm() -> None:
    engine = _engine()
    async with FakeScheduler(engine=engine) as scheduler:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.gateway"),
            *(
                "--scheduler",
                scheduler.address,
                "--port",
                "0",
                "--http-port",
                "0",
                "--grace",
                "5",
                "--log-format",
                "json",
            ),
            cwd=ROOT,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(60):
                listening = await _event(process.stderr, "service_listening")
                ready = await _event(process.stderr, "service_ready")
                session = await scheduler.session()
                resident = psutil.Process(process.pid).memory_info().rss
                async with GatewayClient(listening["address"]) as client:
                    deltas = client.generate("The capital of France is", GenerateOptions(max_tokens=1))
                    await anext(deltas)
                    submit = await session.submitted()
                    process.send_signal(signal.SIGTERM)
                    await _event(process.stderr, "draining")
                    session.end(submit.handle, FinishReason.LENGTH, submit.prompt_token_ids[-1])
                    last = await anext(deltas)
                    assert last.finish is not None
                await _event(process.stderr, "service_stopped")
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert ready["model"] == engine.model
    assert ready["service"] == "gateway"
    assert resident < MAX_RESIDENT_BYTES, f"{resident >> 20} MiB"


def _engine() -> EngineInfo:
    """The default model where it is on this machine, else one with the byte tokenizer."""
    try:
        resolve(SMOLLM2)
    except OrcaError:
        return ENGINE
    return dataclasses.replace(ENGINE, model=SMOLLM2, vocab_size=49152)


async def _event(lines: asyncio.StreamReader, name: str) -> dict[str, Any]:
    while line := await lines.readline():
        if line.startswith(b"{"):
            event: dict[str, Any] = json.loads(line)
            if event["event"] == name:
                return event
    raise AssertionError(f"the process ended without {name}")
