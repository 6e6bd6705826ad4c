"""`orca up` as a user has it: in a process of its own, its output line by line."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import psutil
import pytest

from services.mesh.process import ServiceProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.mesh import LogLine

__all__ = ["OrcaUp", "orca_up"]


class OrcaUp:
    """`orca up` in a process of its own, its output line by line."""

    def __init__(self) -> None:
        self.process: ServiceProcess
        self.shown: list[str] = []
        self._lines: asyncio.Queue[str] = asyncio.Queue()

    def take(self, line: LogLine) -> None:
        self.shown.append(line.text)
        self._lines.put_nowait(line.text)

    async def until(self, pattern: str) -> re.Match[str]:
        """Wait for a line; fails at once where the process ends without one."""
        while True:
            line = asyncio.ensure_future(self._lines.get())
            await asyncio.wait([line, self.process.exit], return_when=asyncio.FIRST_COMPLETED)
            if not line.done():
                line.cancel()
                pytest.fail("\n".join(["ended without the line that was waited for:", *self.shown]))
            if match := re.search(pattern, line.result()):
                return match

    async def until_ready(self) -> str:
        """Wait for readiness; the gateway's address is returned."""
        return (await self.until(r"gRPC\s+(\S+:\d+)"))[1]

    def children(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]

    async def exit_code(self) -> int:
        return (await self.process.exit).returncode


@asynccontextmanager
async def orca_up(model: str, *options: str) -> AsyncIterator[OrcaUp]:
    up = OrcaUp()
    ports = ("--grpc-port", "0", "--http-port", "0")
    command = [sys.executable, "-m", "services.cli", "up", "--model", model, *ports, *options]
    up.process = await ServiceProcess.start("up", command, {**os.environ, "COLUMNS": "120"}, up.take)
    try:
        yield up
    finally:
        up.process.send_signal(signal.SIGKILL)
        await up.process.exit
