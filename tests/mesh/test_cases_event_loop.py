"""R9: every process works the same on either event loop, in debug mode too. R6: a handler may start processes.

R5: a program may use the gateway from two event loops at once.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from services.mesh import MeshOptions
from shared.config import EngineConfig
from shared.topology import Topology
from tests.mesh.live_mesh import live_mesh

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

WITHOUT_UVLOOP = "import sys\nsys.modules['uvloop'] = None\n"
TWO_LOOPS = """
import asyncio, sys, threading
from shared.client import GatewayClient, GenerateOptions
from shared.sync_client import SyncGatewayClient

NUM_CALLS = 40
OPTIONS = GenerateOptions(max_tokens=3, ignore_eos=True)

def ask():
    with SyncGatewayClient(sys.argv[1]) as client:
        for _ in range(NUM_CALLS):
            assert sum(len(delta.token_ids) for delta in client.generate("x", OPTIONS)) == 3
            client.model_info()

async def main():
    async with GatewayClient(sys.argv[1]) as client, asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(ask))
        for _ in range(NUM_CALLS):
            assert sum([len(delta.token_ids) async for delta in client.generate("x", OPTIONS)]) == 3
            await client.model_info()

asyncio.run(main())
"""
EXPECTED = {"service_not_ready", "scheduler_lost"}
"""While the processes leave one by one."""
SLOW = "Executing <"
"""What debug mode says of callbacks that take long, as the first of a kind do."""


@pytest.mark.parametrize("has_uvloop", [True, False], ids=["uvloop", "asyncio"])
async def test_every_process_in_debug_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_uvloop: bool) -> None:
    (tmp_path / "sitecustomize.py").write_text("" if has_uvloop else WITHOUT_UVLOOP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
    options = MeshOptions(EngineConfig(model="synthetic:step_ms=1", topology=Topology(2)), grace_s=5)
    async with live_mesh(options) as live:
        assert len(await live.generate("hello", max_tokens=20)) == 20
        guided = await live.http.post(
            "/v1/completions", json={"prompt": "x", "max_tokens": 5, "guided_regex": "[a-z ]+"}
        )
        assert guided.status_code == 200, guided.text
        assert (await live.http.get("/v1/models")).status_code == 200
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", TWO_LOOPS, live.mesh.gateway_address), stderr=asyncio.subprocess.PIPE
        )
        _, noise = await program.communicate()
        assert (program.returncode, [line for line in noise.decode().splitlines() if SLOW not in line]) == (0, [])
        for name in ("gateway", "scheduler", "stage 0.0", "stage 1.0"):
            live.process(name).send_signal(signal.SIGTERM if name != "stage 1.0" else signal.SIGINT)
            left = await live.process(name).exit
            assert left.returncode == 0, left
    said = [line.text for line in live.lines if line.event is None and SLOW not in line.text]
    assert not said, "\n".join(said)
    complaints = [line for line in live.lines if line.level in {"warning", "error"} and line.event not in EXPECTED]
    assert not complaints
