"""This worker's claim to its rank: made with the scheduler, held as long as both live, made again when it breaks.

The claim of world rank 0 also names the rendezvous store. Each claim gets a store of its own, since a scheduler that
was restarted counts its epochs from the start and must find nothing of the ones before.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
from grpc import aio

from shared.codec.joining import registration_to_pb
from shared.errors import AlreadyClaimedError, ConfigError
from shared.log import get_logger
from shared.pb import worker_pb2, worker_pb2_grpc
from shared.rpc import connect

if TYPE_CHECKING:
    from services.worker.rendezvous import RendezvousServer
    from shared.messages import Registration
    from shared.tls import TlsCredentials

__all__ = ["ask_to_leave", "hold_claim"]

_BACK_OFF_S = (0.1, 5.0)
"""First and longest pause between two attempts."""


async def hold_claim(
    scheduler: str, claim: Registration, rendezvous: RendezvousServer | None, tls: TlsCredentials | None = None
) -> None:
    """Claim the rank and hold on to it; world rank 0 brings its ``rendezvous``. Never returns.

    Raises ``AlreadyClaimedError`` or ``ConfigError`` when the scheduler refuses the claim. After anything else it is
    made again.
    """
    pause = _BACK_OFF_S[0]
    is_known_lost = False
    was_granted = True
    while True:
        if rendezvous is not None and was_granted:
            claim = replace(claim, rendezvous_address=rendezvous.renew())
        was_granted = False
        cause = ""
        try:
            async with connect(scheduler, tls) as channel:
                call = worker_pb2_grpc.WorkerRegistryStub(channel).Register(registration_to_pb(claim))
                async for _ in call:
                    was_granted, is_known_lost = True, False
                    pause = _BACK_OFF_S[0]
                    get_logger().info("claim_granted", scheduler=scheduler)
        except aio.AioRpcError as failure:
            cause = failure.details() or failure.code().name
            if failure.code() is grpc.StatusCode.ALREADY_EXISTS:
                raise AlreadyClaimedError(f"the scheduler at {scheduler} refuses this worker: {cause}") from failure
            if failure.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise ConfigError(f"the scheduler at {scheduler} refuses this worker: {cause}") from failure
        if was_granted and not cause:
            is_known_lost = True
            get_logger().info("claim_ended", scheduler=scheduler, cause="the scheduler left")
        if not is_known_lost:
            is_known_lost = True
            get_logger().warning(
                "claim_lost" if was_granted else "scheduler_unreachable",
                scheduler=scheduler,
                cause=cause,
                advice="still trying; start the scheduler there, or this worker with another --scheduler",
            )
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not a secret
        pause = min(2 * pause, _BACK_OFF_S[1])


async def ask_to_leave(
    scheduler: str, claim: Registration, *, timeout_s: float, tls: TlsCredentials | None = None
) -> None:
    """Return once the engine needs this worker no more, or after ``timeout_s``: it may leave then in any case."""
    request = worker_pb2.LeaveRequest(stage=claim.stage, tp_rank=claim.tp_rank, address=claim.address)
    try:
        async with connect(scheduler, tls) as channel:
            await worker_pb2_grpc.WorkerRegistryStub(channel).Leave(request, timeout=timeout_s)
    except aio.AioRpcError as failure:
        get_logger().info("leaving_unasked", scheduler=scheduler, cause=failure.details() or failure.code().name)
