"""Claiming a rank: refused, lost, late."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest
import torch
from structlog.testing import capture_logs

from services.worker.app import run_worker
from shared.config import ListenConfig, WorkerConfig
from shared.errors import AlreadyClaimedError, ConfigError, OrcaError
from shared.lifecycle import Shutdown
from tests.fakes.fake_worker_peers import FakeRegistry, running_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def worker_task(scheduler: str) -> AsyncIterator[asyncio.Task[None]]:
    shutdown = Shutdown(grace_s=5.0)
    task = asyncio.create_task(run_worker(WorkerConfig(scheduler=scheduler, device="cpu"), shutdown))
    try:
        yield task
    finally:
        shutdown.request("test over")
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("refusal", [AlreadyClaimedError("stage 0 is held"), ConfigError("there is no stage 0")])
async def test_refused_claim_ends_the_worker(refusal: OrcaError) -> None:
    async with FakeRegistry(refusal=refusal).serving() as registry:
        with pytest.raises(type(refusal), match=f"{registry.address} refuses this worker: {refusal}"):
            await run_worker(WorkerConfig(scheduler=registry.address, device="cpu"), Shutdown(grace_s=5.0))


async def test_scheduler_that_comes_late_is_found_and_absence_is_told_once() -> None:
    attempts: asyncio.Queue[None] = asyncio.Queue()

    async def slam(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        attempts.put_nowait(None)
        writer.close()

    not_a_scheduler = await asyncio.start_server(slam, "127.0.0.1", 0)
    port: int = not_a_scheduler.sockets[0].getsockname()[1]
    with capture_logs() as logs:
        async with worker_task(f"127.0.0.1:{port}"):
            for _ in range(3):
                await attempts.get()
            not_a_scheduler.close()
            await not_a_scheduler.wait_closed()
            async with FakeRegistry().serving(port) as registry:
                claim = await registry.claims.get()
                assert claim.rendezvous_address
    events = [entry["event"] for entry in logs]
    assert events.count("scheduler_unreachable") == 1
    assert f"127.0.0.1:{port}" == next(entry["scheduler"] for entry in logs if "advice" in entry)
    assert events.index("service_listening") < events.index("scheduler_unreachable")


async def test_lost_claim_is_made_again_with_a_fresh_store() -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with FakeRegistry().serving() as registry:
            await stack.enter_async_context(worker_task(registry.address))
            first = await registry.claims.get()
        async with FakeRegistry().serving(int(registry.address.rpartition(":")[2])) as registry:
            second = await registry.claims.get()
    assert second.address == first.address
    assert second.rendezvous_address != first.rendezvous_address


async def test_leaving_ends_the_claim() -> None:
    async with FakeRegistry().serving() as registry:
        async with running_worker(registry) as claim:
            assert registry.ended.empty()
        assert await registry.ended.get() == claim


async def test_taken_port_is_a_config_error() -> None:
    async with FakeRegistry().serving() as registry:
        taken = ListenConfig("127.0.0.1", int(registry.address.rpartition(":")[2]))
        with pytest.raises(ConfigError, match="cannot listen"):
            await run_worker(
                WorkerConfig(scheduler=registry.address, device="cpu", listen=taken), Shutdown(grace_s=5.0)
            )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
async def test_missing_gpu_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="--device cpu"):
        await run_worker(WorkerConfig(scheduler="127.0.0.1:1", device="cuda"), Shutdown(grace_s=5.0))
