"""One process of the mesh: started in a session of its own, tied to this process by a pipe, known by its log lines.

It does not know what the service does. Invariant: once ``exit`` is done, nothing of the process's group is alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections import deque
from typing import TYPE_CHECKING

from services.mesh.exits import MeshError, ServiceExit
from services.mesh.log_lines import LineSplitter, parse_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from services.mesh.log_lines import LogLine

__all__ = ["ServiceProcess"]

_NUM_LAST_LINES = 20
_OUTPUT_TIMEOUT_S = 1.0


class ServiceProcess:
    """A running service. ``exit`` is the task that ends with it; ``address`` is known once it listens."""

    def __init__(self, name: str, on_line: Callable[[LogLine], None]) -> None:
        self.name = name
        self.address: str | None = None
        """host:port, from its ``service_listening`` event."""
        self.http_address = ""
        """Base URL of its HTTP front, from its ``http_listening`` event, which comes first; empty where it has none."""
        self.pid = 0
        """Process id, which is the id of its group and session, too."""
        self.exit: asyncio.Task[ServiceExit]
        self._on_line = on_line
        self._last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._reason = ""
        self._listening = asyncio.Event()
        self._ready: asyncio.Future[LogLine] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], environment: Mapping[str, str], on_line: Callable[[LogLine], None]
    ) -> ServiceProcess:
        """Start ``command``; ``on_line`` is called for every line that it writes."""
        process = cls(name, on_line)
        transport, pipes = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Pipes(process._take),
            *command,
            # The process watches its end of this pipe: it closes with us, however we end.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            # Ctrl-C in the terminal reaches the supervisor only, which drains in the right order.
            start_new_session=True,
        )
        process.pid = transport.get_pid()
        process.exit = asyncio.create_task(process._watch(transport, pipes), name=f"exit of {name}")
        return process

    async def listening(self) -> str:
        """Wait until it listens and return host:port. Raises ``MeshError`` where it ended before."""
        await self._listening.wait()
        if self.address is None:
            service_exit = await self.exit
            raise MeshError(service_exit.summary, service_exit)
        return self.address

    async def ready(self) -> LogLine:
        """Wait until it says for the first time that it serves, and return that line; never where it ends before."""
        return await asyncio.shield(self._ready)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone; one that has ended does not mind."""
        if not self.exit.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def stop(self, grace_s: float, wish: signal.Signals = signal.SIGTERM) -> None:
        """Ask it to leave, and kill it where it has not done so in time."""
        self.send_signal(wish)
        await asyncio.wait([self.exit], timeout=grace_s)
        self.send_signal(signal.SIGKILL)
        await asyncio.wait([self.exit])

    async def _watch(self, transport: asyncio.SubprocessTransport, pipes: _Pipes) -> ServiceExit:
        await pipes.exited.wait()
        # What it has started itself goes with it, and lets go of its end of our pipe.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(pipes.output_ended.wait(), _OUTPUT_TIMEOUT_S)
        returncode = transport.get_returncode()
        transport.close()
        self._listening.set()
        return ServiceExit(self.name, returncode or 0, self._reason, tuple(self._last_lines))

    def _take(self, text: str) -> None:
        self._last_lines.append(text)
        line = parse_line(self.name, text)
        if line.event == "service_listening":
            self.address = str(line.fields.get("address", ""))
            self._listening.set()
        elif line.event == "http_listening":
            self.http_address = str(line.fields.get("address", ""))
        elif line.event == "service_ready" and not self._ready.done():
            self._ready.set_result(line)
        elif line.event == "service_failed":
            self._reason = str(line.fields.get("message") or line.fields.get("error") or "")
        self._on_line(line)


class _Pipes(asyncio.SubprocessProtocol):
    """What the event loop tells of a process. Its exit and the end of its output come in any order."""

    def __init__(self, on_text: Callable[[str], None]) -> None:
        self.exited = asyncio.Event()
        self.output_ended = asyncio.Event()
        self._on_text = on_text
        self._splitter = LineSplitter()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Take output."""
        del fd
        for text in self._splitter.feed(data):
            self._on_text(text)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Take the end of the output; standard input's end says nothing."""
        del exc
        if fd == 1:
            for text in self._splitter.end():
                self._on_text(text)
            self.output_ended.set()

    def process_exited(self) -> None:
        """Take the exit."""
        self.exited.set()
