"""Meshes one after the other on the same workers: those take seconds to start, all else half of one."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

from services.mesh.local_mesh import LocalMesh
from services.mesh.options import MeshOptions
from shared.config import EngineConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from services.mesh.process import ServiceProcess
    from shared.topology import Topology

__all__ = ["KeptWorkers"]

GRACE_S = 10.0


class KeptWorkers:
    """The workers of a topology, whatever the engine. They find each scheduler where the first one was."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._workers: dict[str, ServiceProcess] = {}
        self._port = "0"

    async def __aenter__(self) -> Self:
        mesh = LocalMesh(MeshOptions(engine=EngineConfig(model="synthetic:", topology=self.topology)))
        await mesh.start()
        self._port = mesh.scheduler_address.rpartition(":")[2]
        self._workers = {name: process for name, process in mesh.processes.items() if name.startswith("stage")}
        await self._stop_all_but_workers(mesh)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._workers.values():
            await process.stop(GRACE_S)

    @contextlib.asynccontextmanager
    async def mesh(self, engine: EngineConfig) -> AsyncIterator[LocalMesh]:
        """Run a mesh for as long as the block lasts."""
        assert engine.topology == self.topology
        mesh = LocalMesh(MeshOptions(engine=engine))
        mesh.processes = dict(self._workers)
        try:
            command = mesh.options.scheduler_command()
            command[command.index("--port") + 1] = self._port
            scheduler = await mesh._spawn("scheduler", command)
            mesh.scheduler_address = await scheduler.listening()
            gateway = await mesh._spawn("gateway", mesh.options.gateway_command(mesh.scheduler_address))
            mesh.gateway_address = await gateway.listening()
            await mesh.wait_ready()
            yield mesh
        finally:
            await self._stop_all_but_workers(mesh)

    async def _stop_all_but_workers(self, mesh: LocalMesh) -> None:
        for name in self._workers:
            del mesh.processes[name]
        await mesh.stop()
