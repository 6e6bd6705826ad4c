"""One process under the supervisor, played by a few lines of Python."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from services.mesh import MeshError
from services.mesh.process import ServiceProcess
from tests.process_end import wait_ended

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.mesh import LogLine

LISTENING = """
import sys, signal
print('{"event": "service_listening", "level": "info", "address": "127.0.0.1:7"}', flush=True)
"""


class Lines:
    """What a process wrote, to be waited for."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[LogLine] = asyncio.Queue()

    def take(self, line: LogLine) -> None:
        self._queue.put_nowait(line)

    async def until(self, text: str) -> LogLine:
        while True:
            line = await self._queue.get()
            if text in line.text:
                return line


@asynccontextmanager
async def running(script: str, lines: Lines | None = None) -> AsyncIterator[ServiceProcess]:
    command = [sys.executable, "-c", script]
    process = await ServiceProcess.start("fake", command, os.environ, (lines or Lines()).take)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        await process.exit


async def test_its_address_is_learned_from_its_log() -> None:
    async with running(LISTENING + "sys.stdin.read()") as process:
        assert await process.listening() == "127.0.0.1:7"
        assert process.address == "127.0.0.1:7"


async def test_it_sees_the_end_of_the_pipe_when_its_parent_goes() -> None:
    # The parent is a process of its own here, which starts the child as the supervisor does and is then killed.
    parent = f"""
import asyncio, os, sys
sys.path.insert(0, {str(Path.cwd())!r})
from services.mesh.process import ServiceProcess
async def main():
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    child = await ServiceProcess.start("child", command, os.environ, print)
    print("child", child.pid, flush=True)
    await child.exit
asyncio.run(main())
"""
    lines = Lines()
    async with running(parent, lines) as process:
        child = int((await lines.until("child ")).text.split()[1])
        process.send_signal(signal.SIGKILL)
        await process.exit
    await wait_ended(child)


async def test_it_has_a_session_of_its_own() -> None:
    async with running(LISTENING + "sys.stdin.read()") as process:
        await process.listening()
        assert os.getsid(process.pid) == process.pid != os.getsid(0)


async def test_both_of_its_outputs_are_read() -> None:
    lines = Lines()
    async with running("import sys; print('out', flush=True); print('err', file=sys.stderr)", lines) as process:
        await lines.until("out")
        await lines.until("err")
        assert (await process.exit).last_lines == ("out", "err")


async def test_one_that_ends_before_it_listens_says_why() -> None:
    failed = '{"event": "service_failed", "level": "error", "message": "no such model"}'
    async with running(f"print({failed!r}); raise SystemExit(1)") as process:
        with pytest.raises(MeshError, match=r"^fake exited with code 1: no such model$") as raised:
            await process.listening()
        assert raised.value.exit == await process.exit


async def test_only_the_last_lines_are_kept() -> None:
    async with running("for n in range(100): print(n)") as process:
        assert (await process.exit).last_lines == tuple(str(n) for n in range(80, 100))


async def test_sigterm_first_and_no_kill_for_one_that_leaves() -> None:
    async with running(
        LISTENING + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\nsys.stdin.read()"
    ) as process:
        await process.listening()
        await process.stop(grace_s=30)
        assert (await process.exit).returncode in {5, -signal.SIGTERM}


async def test_one_that_does_not_leave_in_time_is_killed() -> None:
    ignoring = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)" + LISTENING + "sys.stdin.read()"
    async with running(ignoring) as process:
        await process.listening()
        await process.stop(grace_s=0.05)
        assert (await process.exit).returncode == -signal.SIGKILL


async def test_what_it_started_itself_goes_with_it() -> None:
    lines = Lines()
    script = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
print("grandchild", child.pid, flush=True)
sys.stdin.read()
"""
    async with running(script, lines) as process:
        grandchild = int((await lines.until("grandchild")).text.split()[1])
        process.send_signal(signal.SIGKILL)
        await process.exit
    await wait_ended(grandchild)


async def test_stopping_one_that_has_ended_does_nothing() -> None:
    async with running("") as process:
        await process.exit
        await process.stop(grace_s=0)
        assert (await process.exit).returncode == 0
