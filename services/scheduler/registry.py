"""Who holds which rank: the workers' claims, each as long-lived as its registration stream.

A claim ends when its stream ends, on either side and by whatever cause, so a dead worker is known at once; the stream
ends when its claim is dropped, as that of a worker that hangs is (``heartbeat``). This module does not join workers to
an engine (``epoch``).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from shared.codec.joining import registration_from_pb
from shared.errors import AlreadyClaimedError, ConfigError, UnavailableError
from shared.log import get_logger
from shared.messages import Registration, WorkerStatus
from shared.pb import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from grpc import aio

    from shared.topology import Topology

__all__ = ["WorkerRegistry", "WorkerRegistryServicer"]

Rank = tuple[int, int]


class WorkerRegistry:
    """Claims by rank, and what each worker is doing, for people."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._claims: dict[Rank, Registration] = {}
        self._states: dict[Rank, tuple[str, str]] = {}
        self._why_lost: dict[Rank, str] = {}
        self._changed = asyncio.Condition()
        self._is_closed = False

    def claims(self) -> list[Registration]:
        """Claims in order of world rank."""
        return [self._claims[rank] for rank in self.topology.ranks() if rank in self._claims]

    def missing(self) -> list[Rank]:
        """Ranks that nobody holds."""
        return [rank for rank in self.topology.ranks() if rank not in self._claims]

    def holds(self, claim: Registration) -> bool:
        """Whether this very claim still stands."""
        return self._claims.get((claim.stage, claim.tp_rank)) is claim

    async def claim(self, registration: Registration) -> None:
        """Take a rank. Raises ``ConfigError`` where there is none such, ``AlreadyClaimedError`` where it is taken."""
        rank = (registration.stage, registration.tp_rank)
        self.topology.check_rank(*rank)
        if not registration.address:
            raise ConfigError("a worker must register with the address at which it can be reached")
        held = self._claims.get(rank)
        if held is not None:
            raise AlreadyClaimedError(
                f"stage {rank[0]}, tensor-parallel rank {rank[1]} is held by the worker at {held.address}; "
                f"stop that worker or start this one with another --stage or --tp-rank"
            )
        self._claims[rank] = registration
        await self.set_state(rank, "registered")

    async def drop(self, claim: Registration, why: str = "is gone") -> None:
        """End a claim, if it still stands; ``why`` goes on after "the worker"."""
        if self.holds(claim):
            rank = (claim.stage, claim.tp_rank)
            del self._claims[rank]
            self._states.pop(rank, None)
            self._why_lost[rank] = why
            await self._notify()

    async def set_state(self, rank: Rank, state: str, detail: str = "") -> None:
        """Note what the worker of a rank is doing."""
        self._states[rank] = (state, detail)
        await self._notify()

    async def close(self) -> None:
        """The scheduler leaves: end all claims in good order."""
        self._is_closed = True
        await self._notify()

    async def wait_over(self, claim: Registration) -> None:
        """Wait until the scheduler leaves. Raises ``UnavailableError`` where the claim is dropped before."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_closed or not self.holds(claim))
        if not self._is_closed:
            raise UnavailableError(f"the scheduler gave this rank up: its worker {self.why_lost(claim)}")

    async def wait_complete(self) -> list[Registration]:
        """Wait until every rank is held; claims in order of world rank."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self.missing())
            return self.claims()

    async def wait_lost(self, claims: list[Registration]) -> Registration:
        """Wait until one of these claims ends, and return it."""
        async with self._changed:
            await self._changed.wait_for(lambda: any(not self.holds(claim) for claim in claims))
            return next(claim for claim in claims if not self.holds(claim))

    def why_lost(self, claim: Registration) -> str:
        """Why the latest claim to its rank ended; goes on after "the worker"."""
        return self._why_lost.get((claim.stage, claim.tp_rank), "is gone")

    def statuses(self) -> tuple[WorkerStatus, ...]:
        """All ranks, those that are missing too."""
        found = []
        for stage, tp_rank in self.topology.ranks():
            claim = self._claims.get((stage, tp_rank))
            state, detail = self._states.get((stage, tp_rank), ("missing", ""))
            found.append(WorkerStatus(stage, tp_rank, "" if claim is None else claim.address, state, detail))
        return tuple(found)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class WorkerRegistryServicer(worker_pb2_grpc.WorkerRegistryServicer):
    """The registry's gRPC face."""

    def __init__(self, registry: WorkerRegistry, wind_down: Callable[[str], Awaitable[None]]) -> None:
        """``wind_down`` is called for a worker that wants to leave, with the reason; it returns when it may."""
        self._registry = registry
        self._wind_down = wind_down

    async def Register(  # noqa: N802 - the contract's name
        self, request: worker_pb2.RegisterRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.RegistryEvent]:
        """Hold the rank until either side ends the stream."""
        del context
        claim = registration_from_pb(request)
        log = get_logger().bind(stage=claim.stage, tp_rank=claim.tp_rank, address=claim.address)
        await self._registry.claim(claim)
        log.info("worker_registered", device=claim.device)
        try:
            yield worker_pb2.RegistryEvent(granted=True)
            await self._registry.wait_over(claim)  # or until the peer ends the call
        finally:
            await self._registry.drop(claim)
            log.info("worker_gone")

    async def Leave(  # noqa: N802 - the contract's name
        self, request: worker_pb2.LeaveRequest, context: aio.ServicerContext[Any, Any]
    ) -> worker_pb2.LeaveResponse:
        """Answer once nobody needs the worker any more."""
        del context
        claimed = {(claim.stage, claim.tp_rank, claim.address) for claim in self._registry.claims()}
        if (request.stage, request.tp_rank, request.address) in claimed:
            await self._wind_down(
                f"the worker of stage {request.stage}, tensor-parallel rank {request.tp_rank} is leaving"
            )
        return worker_pb2.LeaveResponse()
