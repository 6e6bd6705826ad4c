"""Passing control messages on: to the leader of the next stage, and to this stage's other ranks.

A leader writes each message on before its own compute of that step may start, so no CPU waits for a device to hand over
control (ORCA §4.1). Messages pass through as they came, never decoded here.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from grpc import aio

from shared.errors import EngineLostError
from shared.pb import worker_pb2_grpc
from shared.rpc import connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.messages import JoinRequest
    from shared.pb import worker_pb2
    from shared.tls import TlsCredentials

__all__ = ["Onward", "Peer", "peers_of"]


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker that takes this one's control messages."""

    name: str
    address: str


def peers_of(request: JoinRequest) -> list[Peer]:
    """Return who is to get the control messages of this rank; nobody, on ranks that lead no stage."""
    peers = [Peer(f"stage {request.stage + 1}", request.next_stage_address)] if request.next_stage_address else []
    return peers + [
        Peer(f"stage {request.stage}, rank {rank}", address)
        for rank, address in enumerate(request.tp_addresses, start=1)
    ]


class Onward:
    """Control streams to all peers, opened with the first message. A peer that fails is named to ``on_lost``."""

    def __init__(
        self, peers: list[Peer], on_lost: Callable[[EngineLostError], None], tls: TlsCredentials | None = None
    ) -> None:
        self._peers = peers
        self._tls = tls
        self._on_lost = on_lost
        self._channels: list[aio.Channel] = []
        self._calls: list[aio.StreamUnaryCall[Any, Any]] = []
        self._watches: list[asyncio.Task[None]] = []
        self._is_finishing = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for call, watch in zip(self._calls, self._watches, strict=True):
            call.cancel()
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for channel in self._channels:
            await channel.close()

    async def write(self, message: worker_pb2.StepPlan) -> None:
        """Write to all peers; returns when each stream has taken the message. Raises ``EngineLostError``."""
        if not self._peers:
            return
        if not self._calls:
            self._open()
        try:
            await asyncio.gather(*(call.write(message) for call in self._calls))
        except (aio.AioRpcError, asyncio.InvalidStateError) as failure:
            await asyncio.wait(self._watches, return_when=asyncio.FIRST_COMPLETED)  # which tells who and why
            raise EngineLostError("a peer took no control message") from failure

    async def finish(self) -> None:
        """Tell the peers that nothing more comes, and wait until they have computed all."""
        self._is_finishing = True
        for call in self._calls:
            await call.done_writing()
        await asyncio.gather(*self._watches)

    def _open(self) -> None:
        for peer in self._peers:
            channel = connect(peer.address, self._tls)
            call = worker_pb2_grpc.WorkerStub(channel).Execute()
            self._channels.append(channel)
            self._calls.append(call)
            self._watches.append(asyncio.create_task(self._watch(peer, call)))

    async def _watch(self, peer: Peer, call: aio.StreamUnaryCall[Any, Any]) -> None:
        try:
            await call
        except aio.AioRpcError as failure:
            self._on_lost(EngineLostError(f"{_where(peer)} is lost: {failure.details() or failure.code().name}"))
        else:
            if not self._is_finishing:
                self._on_lost(EngineLostError(f"{_where(peer)} ended its control stream"))


def _where(peer: Peer) -> str:
    return f"{peer.name} at {peer.address}"
