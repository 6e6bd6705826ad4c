"""A server process with all that it starts: one process group, which can be frozen while another has the machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from typing import TYPE_CHECKING

from bench.load.client import find_model
from bench.load.endpoint import Endpoint
from shared.errors import OrcaError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bench.load.endpoint import ServedModel

__all__ = ["Server", "free_port"]

_POLL_S = 0.1
_STOP_S = 20.0


class Server:
    """A server of OpenAI's API on this host; what it writes goes to a file."""

    def __init__(self, command: Sequence[str], port: int, environment: Mapping[str, str], log: Path) -> None:
        self.endpoint = Endpoint.parse(f"http://127.0.0.1:{port}")
        self._command = command
        self._environment = environment
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_started(self) -> bool:
        """Whether there is a process, frozen or not."""
        return self._process is not None

    async def start(self, timeout_s: float) -> ServedModel:
        """Start it and wait until it tells which model it serves.

        Raises:
            UnavailableError: it ended, or took too long; its log tells why.
        """
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._log.parent,
                env=self._environment,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ready(self._process)
        except TimeoutError:
            raise UnavailableError(f"{self._command[0]} was not ready in {timeout_s:g} s: see {self._log}") from None

    async def _ready(self, process: asyncio.subprocess.Process) -> ServedModel:
        while process.returncode is None:
            with contextlib.suppress(OrcaError, OSError):
                return await find_model(self.endpoint)
            await asyncio.sleep(_POLL_S)
        raise UnavailableError(f"{self._command[0]} ended with status {process.returncode}: see {self._log}")

    def freeze(self) -> None:
        """Take the processor from it; its memory stays as it is."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    async def stop(self) -> None:
        """End it: politely, then at once."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await process.wait()
        finally:
            # Whoever of the group did not leave with its first process.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)


def free_port() -> int:
    """Return a port that nobody listens at just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
