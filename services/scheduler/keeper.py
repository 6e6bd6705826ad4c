"""Keeps the engine alive: one epoch after the other, for as long as the service runs."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from services.scheduler.epoch import join_epoch
from services.scheduler.heartbeat import watch_heartbeats
from shared.errors import ConfigError, EngineLostError, InvalidRequestError, ModelError, OrcaError
from shared.ids import Epoch
from shared.log import get_logger

if TYPE_CHECKING:
    from services.scheduler.epoch import EngineLink
    from services.scheduler.loop import EngineLoop
    from services.scheduler.registry import WorkerRegistry
    from shared.config import SchedulerConfig
    from shared.rpc import RpcServer
    from shared.tls import TlsCredentials

__all__ = ["EngineKeeper"]

_BACK_OFF_S = (0.1, 5.0)
"""First and longest pause between two attempts to join an epoch."""


class EngineKeeper:
    """Joins an epoch, watches it, and when it is lost joins the next.

    What no retry can mend (a model that cannot be read, options that cannot work) is raised and ends the service.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        registry: WorkerRegistry,
        loop: EngineLoop,
        server: RpcServer,
        tls: TlsCredentials | None = None,
    ) -> None:
        """``tls`` is for the calls to workers."""
        self._config = config.engine
        self._heartbeat_s = config.heartbeat_s
        self._tls = tls
        self._registry = registry
        self._loop = loop
        self._server = server
        self.epoch = Epoch(0)
        self.reason = ""
        """Why the engine is not ready, beyond workers that are missing."""
        self._over = asyncio.Event()
        self._over.set()

    async def run(self) -> None:
        """Keep the engine alive until cancelled."""
        pause = _BACK_OFF_S[0]
        while True:
            self.epoch = Epoch(self.epoch + 1)
            try:
                async with join_epoch(self.epoch, self._config, self._registry, self._tls) as link:
                    await self._serve(link)
            except (ModelError, ConfigError, InvalidRequestError):
                raise
            except OrcaError as lost:
                self.reason = str(lost)
                get_logger().error("engine_lost", epoch=self.epoch, message=str(lost))
            if self._loop.has_results:
                pause = _BACK_OFF_S[0]
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - back-off jitter
            pause = min(2 * pause, _BACK_OFF_S[1])

    async def wind_down(self, why: str) -> None:
        """Take no new requests in this epoch, and return once those that are here have ended, or the epoch has."""
        if self._over.is_set():
            return
        get_logger().info("winding_down", epoch=self.epoch, reason=why)
        self.reason = why
        self._loop.retire()
        await self._server.set_ready(ready=False)
        waits = [asyncio.ensure_future(wait) for wait in (self._loop.wait_idle(), self._over.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _serve(self, link: EngineLink) -> None:
        """Serve in this epoch until it is lost. Always raises ``EngineLostError``."""
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_lost(lost: EngineLostError) -> None:
            if not broken.done():
                broken.set_exception(lost)

        self._over.clear()
        self._loop.begin_epoch(link, on_lost)
        self.reason = ""
        await self._server.set_ready(ready=True)
        get_logger().info(
            "engine_ready",
            epoch=link.epoch,
            model=link.info.model,
            num_stages=link.info.num_stages,
            tp_size=link.info.tp_size,
            num_slots=link.info.num_slots,
        )
        if link.info.num_slots < link.info.max_model_len:
            get_logger().warning(
                "context_exceeds_kv",
                max_model_len=link.info.max_model_len,
                num_slots=link.info.num_slots,
                advice="no request can have more tokens than K/V slots: raise --kv-memory for the whole context",
            )
        watches = [
            asyncio.ensure_future(watch)
            for watch in (
                link.pump_results(self._loop.deliver),
                link.pump_plans(),
                link.watch_plans(),
                self._watch_claims(),
                watch_heartbeats(link.workers, self._registry, self._heartbeat_s),
                self._loop.watch_progress(self._config.collective_timeout_s),
                broken,
            )
        ]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            for watch in done:
                watch.result()
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            self._loop.end_epoch()
            self._over.set()
            await self._server.set_ready(ready=False)

    async def _watch_claims(self) -> None:
        lost = await self._registry.wait_lost(self._registry.claims())
        why = self._registry.why_lost(lost)
        raise EngineLostError(f"the worker of stage {lost.stage}, tensor-parallel rank {lost.tp_rank} {why}")
