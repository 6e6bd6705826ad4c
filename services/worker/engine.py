"""Which epoch this worker is in: at most one, and weights that outlive it.

A request to join always wins over what was there, an epoch or an earlier request to join, because only a scheduler that
has given those up sends one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from services.worker.joining import Joining
from services.worker.membership import Membership
from services.worker.threads import start_thread
from services.worker.timeline import Timeline
from shared.errors import ConfigError, EngineLostError, OrcaError, ProtocolError, UnavailableError
from shared.log import get_logger
from shared.topology import Topology

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    import torch

    from services.worker.joining import Assembly
    from services.worker.loading import LoadedStage
    from services.worker.observer import StepObserver
    from shared.clock import Clock
    from shared.messages import Joined, JoinRequest, Loading

__all__ = ["Engine", "SetReady"]


class SetReady(Protocol):
    """Publishes whether this worker is in an epoch."""

    async def __call__(self, *, ready: bool) -> None:
        """Publish."""


class Engine:
    """The epochs of one rank, one after the other.

    ``choose_device`` gives the device for a world rank.
    """

    def __init__(
        self,
        *,
        stage: int,
        tp_rank: int,
        host: str,
        choose_device: Callable[[int], torch.device],
        clock: Clock,
        set_ready: SetReady,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        self._rank = (stage, tp_rank)
        self._host = host
        self._choose_device = choose_device
        self._clock = clock
        self._set_ready = set_ready
        self._observers = observers
        self._is_leaving = False
        self._loaded: LoadedStage | None = None
        self._joining: Joining | None = None
        self._joining_thread: asyncio.Future[Assembly] | None = None
        self._turn = asyncio.Lock()
        self._latest: JoinRequest | None = None
        self._membership: Membership | None = None
        self._watch: asyncio.Task[None] | None = None
        self.timeline = Timeline()
        """Of the current epoch, or the last one."""

    def membership(self) -> Membership:
        """Return the current epoch's. Raises ``ProtocolError`` when there is none."""
        if self._membership is None:
            raise ProtocolError("this worker is in no epoch: it must join one first")
        return self._membership

    async def join(self, request: JoinRequest) -> AsyncGenerator[Loading | Joined]:
        """Leave what was, load, meet the others; yields progress, ``Joined`` last. Raises what is in the way.

        Closing the iterator gives up; the next request waits until the work has stopped.
        """
        topology = self._check(request)
        self._latest = request
        await self._give_up()
        async with self._turn:
            await self._leave(EngineLostError(f"epoch {request.epoch} takes the place of the one before"))
            if self._is_leaving:
                raise UnavailableError("this worker is leaving")
            if self._latest is not request:
                raise EngineLostError(f"a later request to join took the place of epoch {request.epoch}")
            progress: asyncio.Queue[Loading | None] = asyncio.Queue()
            loop = asyncio.get_running_loop()
            device = self._choose_device(topology.world_rank(*self._rank))
            kept, self._loaded = self._loaded, None
            joining = Joining(
                request,
                device=device,
                host=self._host,
                kept=kept,
                report=lambda loading: _post(loop, progress, loading),
            )
            del kept
            self._joining = joining
            thread = self._joining_thread = start_thread(joining.run, name=f"join-{request.epoch}")
            thread.add_done_callback(lambda _: progress.put_nowait(None))
            try:
                while (loading := await progress.get()) is not None:
                    yield loading
                joined = await self._begin(request, thread.result())
            finally:
                await self._give_up()
                self._loaded = joining.loaded
                self._joining = self._joining_thread = None
                if self._membership is None and thread.exception() is None:
                    thread.result().communicator.close()
        yield joined

    async def close(self, grace_s: float) -> None:
        """Leave for good: the step under way ends, within ``grace_s`` seconds."""
        self._is_leaving = True
        try:
            async with asyncio.timeout(grace_s):
                await self._give_up()
                await self._leave(UnavailableError("this worker is leaving"))
        except TimeoutError:
            get_logger().warning("compute_still_busy", grace_s=grace_s)

    def _check(self, request: JoinRequest) -> Topology:
        topology = Topology(request.num_stages, request.tp_size)
        if (request.stage, request.tp_rank) != self._rank:
            raise ProtocolError(
                f"this worker is stage {self._rank[0]}, rank {self._rank[1]}, and was asked to join as stage "
                f"{request.stage}, rank {request.tp_rank}"
            )
        topology.check_rank(*self._rank)
        if request.block_size < 1:
            raise ConfigError("--block-size must be at least 1")
        if topology.world_size > 1 and request.collective_timeout_s < 1:
            raise ConfigError("--collective-timeout must be at least 1 second")
        return topology

    async def _begin(self, request: JoinRequest, assembly: Assembly) -> Joined:
        membership = Membership(request, assembly, self._clock, self._observers)
        self._membership = membership
        self.timeline = membership.timeline
        joined = assembly.joined
        for observer in self._observers:
            observer.epoch_began(joined)
        get_logger().info(
            "epoch_joined",
            epoch=request.epoch,
            model=request.model,
            dtype=joined.dtype,
            num_blocks=joined.num_blocks,
            max_model_len=joined.max_model_len,
            weights_bytes=joined.weights_bytes,
        )
        await self._set_ready(ready=True)
        self._watch = asyncio.create_task(self._watch_over(membership))
        return joined

    async def _watch_over(self, membership: Membership) -> None:
        reason = await membership.over
        get_logger().info(
            "epoch_over", epoch=membership.request.epoch, error=type(reason).__name__, message=str(reason)
        )
        await self._set_ready(ready=False)
        await membership.closed()
        for observer in self._observers:
            observer.epoch_over()

    async def _leave(self, reason: OrcaError) -> None:
        if self._membership is not None:
            self._membership.end(reason)
            if self._watch is not None:
                await asyncio.wait({self._watch})
            self._membership = self._watch = None

    async def _give_up(self) -> None:
        """Stop joining, if that is under way, and wait until its thread has ended."""
        joining, thread = self._joining, self._joining_thread
        if joining is None or thread is None or thread.done():
            return
        start_thread(joining.abandon, name=f"give-up-{joining.epoch}")
        await asyncio.wait({thread})


def _post(loop: asyncio.AbstractEventLoop, progress: asyncio.Queue[Loading | None], loading: Loading) -> None:
    loop.call_soon_threadsafe(progress.put_nowait, loading)
