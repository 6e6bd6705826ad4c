"""A mesh of processes on this host: started in the right order, drained in the right order, never left behind.

Order of start: the scheduler, whose address all others need; then workers and gateway together. Order of leaving: the
gateway (which lets its clients finish), the scheduler, the workers. Each process holds one end of a pipe of ours and
leaves when it closes, so that not even SIGKILL of the supervisor leaves one behind.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from typing import TYPE_CHECKING, Any, Self, TypeVar

from services.mesh.exits import MeshError, ServiceExit
from services.mesh.ports import check_port, dial_address, dial_url
from services.mesh.process import ServiceProcess
from shared.lifecycle import LEAVE_NOW
from shared.messages import EngineInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from types import TracebackType

    from services.mesh.log_lines import LogLine
    from services.mesh.options import MeshOptions

__all__ = ["LocalMesh", "worker_name"]

T = TypeVar("T")

_KILL_MARGIN_S = 2.0
"""A service ends its own drain after the grace time; only one that does not is killed, this much later."""

_LAST_WORDS_S = 3.0
"""Time between a service's last answer and its end."""


def worker_name(stage: int, tp_rank: int) -> str:
    """Name of a worker within the mesh."""
    return f"stage {stage}.{tp_rank}"


class LocalMesh:
    """All processes of a mesh.

    ``async with LocalMesh(MeshOptions(...)) as mesh:`` is a mesh that serves; at the end of the block it is gone. A
    process that dies inside the block is told by ``first_exit`` only: what that means is the caller's to say.
    """

    def __init__(self, options: MeshOptions, on_line: Callable[[LogLine], None] | None = None) -> None:
        self.options = options
        self.processes: dict[str, ServiceProcess] = {}
        """By name: "scheduler", "gateway", "stage 0.0", …"""
        self.scheduler_address = ""
        self.gateway_address = ""
        """host:port at which a client of this host reaches the gateway."""
        self.http_address = ""
        """Base URL of the gateway's HTTP front; empty where it is off."""
        self.worker_addresses: dict[tuple[int, int], str] = {}
        """host:port of each worker's control plane by (stage, tp_rank)."""
        self._on_line = on_line or _ignore

    async def start(self) -> None:
        """Start all processes and learn their addresses. Raises ``MeshError``; nothing is left running then."""
        options = self.options
        check_port(options.listen.host, options.listen.port, option="--grpc-port")
        if options.http is not None:
            check_port(options.http.listen.host, options.http.listen.port, option="--http-port")
        try:
            scheduler = await self._spawn("scheduler", options.scheduler_command())
            self.scheduler_address = await scheduler.listening()
            for stage, tp_rank in options.engine.topology.ranks():
                command = options.worker_command(self.scheduler_address, stage, tp_rank)
                await self._spawn(worker_name(stage, tp_rank), command)
            gateway = await self._spawn("gateway", options.gateway_command(self.scheduler_address))
            self.gateway_address = dial_address(await self._unless_one_exits(gateway.listening()))
            self.http_address = dial_url(gateway.http_address)
            for stage, tp_rank in options.engine.topology.ranks():
                worker = self.processes[worker_name(stage, tp_rank)]
                self.worker_addresses[stage, tp_rank] = await self._unless_one_exits(worker.listening())
        except BaseException:
            await self.kill()
            raise

    async def wait_ready(self) -> EngineInfo:
        """Wait until the gateway serves, and return what. Raises ``MeshError`` as soon as a process ends instead.

        It is told by the gateway's log, not by a call: that would need the certificates and keys of a client.
        """
        line = await self._unless_one_exits(self.processes["gateway"].ready())
        fields: Mapping[str, Any] = line.fields
        return EngineInfo(**{field.name: fields[field.name] for field in dataclasses.fields(EngineInfo)})

    async def first_exit(self) -> ServiceExit:
        """Wait until a process ends, by whatever cause."""
        exits = [process.exit for process in self.processes.values()]
        done, _ = await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)
        return next(task.result() for task in exits if task in done)

    async def stop(self, grace_s: float | None = None) -> None:
        """Drain gateway, scheduler and workers, in this order, each within the grace time; cancelled, kill them all.

        Without any grace (0) what they have under way fails, and clients are told so.
        """
        wish = LEAVE_NOW if grace_s == 0 else signal.SIGTERM
        limit_s = (self.options.grace_s if grace_s is None else grace_s) + _KILL_MARGIN_S
        workers = [process for name, process in self.processes.items() if name not in {"gateway", "scheduler"}]
        fronts = [[self.processes[name]] for name in ("gateway", "scheduler") if name in self.processes]
        try:
            for tier in [*fronts, workers]:
                async with asyncio.TaskGroup() as group:
                    for process in tier:
                        group.create_task(process.stop(limit_s, wish))
        except BaseException:
            await self.kill()
            raise

    async def kill(self) -> None:
        """End all processes at once."""
        self.kill_nowait()
        if self.processes:
            await asyncio.wait([process.exit for process in self.processes.values()])

    def kill_nowait(self) -> None:
        """Send SIGKILL to all processes; a running ``stop`` comes to its end by it."""
        for process in self.processes.values():
            process.send_signal(signal.SIGKILL)

    async def _spawn(self, name: str, command: list[str]) -> ServiceProcess:
        process = await ServiceProcess.start(name, command, self.options.environment(), self._on_line)
        self.processes[name] = process
        return process

    async def _unless_one_exits(self, wish: Coroutine[Any, Any, T]) -> T:
        """Await ``wish``, or raise ``MeshError`` for the process that ended first."""
        work = asyncio.create_task(wish)
        exits = [process.exit for process in self.processes.values()]
        try:
            await asyncio.wait([work, *exits], return_when=asyncio.FIRST_COMPLETED)
            if work.done() and work.exception() is not None:
                # A wish that failed most often failed because a process is just ending: that is the cause to tell.
                await asyncio.wait(exits, timeout=_LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED)
            for task in exits:
                if task.done():
                    raise MeshError(task.result().summary, task.result())
            return await work
        finally:
            work.cancel()
            await asyncio.wait([work])

    async def __aenter__(self) -> Self:
        await self.start()
        try:
            await self.wait_ready()
        except BaseException:
            await self.kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()


def _ignore(line: LogLine) -> None:
    del line
