"""Messages that are none, and messages that are too much, at every method of every service: clean errors, no more."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import pytest
import pytest_asyncio

from services.mesh import MeshOptions
from shared.config import EngineConfig
from shared.pb import gateway_pb2, scheduler_pb2, worker_pb2
from tests.mesh.live_mesh import LiveMesh, live_mesh

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from google.protobuf.descriptor import MethodDescriptor

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

METHODS: list[MethodDescriptor] = [
    method
    for module in (gateway_pb2, scheduler_pb2, worker_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
BUGS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
LIMIT_S = 5.0
MIB = 1 << 20


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def live() -> AsyncIterator[LiveMesh]:
    async with live_mesh(MeshOptions(EngineConfig(model="synthetic:step_ms=1"), grace_s=1)) as running:
        yield running


def address_of(live: LiveMesh, method: MethodDescriptor) -> str:
    return {
        "Gateway": live.mesh.gateway_address,
        "Scheduler": live.mesh.scheduler_address,
        "WorkerRegistry": live.mesh.scheduler_address,
        "Worker": live.mesh.worker_addresses[0, 0],
    }[method.containing_service.name]


async def send(live: LiveMesh, method: MethodDescriptor, *messages: bytes) -> grpc.StatusCode:
    """Send bytes as they are, as somebody with another library would; how the call ended."""
    return await asyncio.to_thread(_send, address_of(live, method), method, messages)


def _send(address: str, method: MethodDescriptor, messages: Sequence[bytes]) -> grpc.StatusCode:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(address, options=options) as channel:
        stub: Any = channel.stream_stream(f"/{method.containing_service.full_name}/{method.name}")
        call = stub(iter(messages), timeout=LIMIT_S)
        with contextlib.suppress(grpc.RpcError):
            for _ in call:
                call.cancel()  # it has been taken for a request; what it wants is not the point
        code: grpc.StatusCode = call.code()
        return code


def garbage(seed: int) -> bytes:
    """Bytes of all kinds: none, noise, and fields of each wire type with numbers and lengths that make no sense."""
    chosen = random.Random(seed)
    match seed % 4:
        case 0:
            return chosen.randbytes(seed % 50)
        case 1:
            return bytes([8 * chosen.randrange(1, 16) + 2, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F]) + chosen.randbytes(20)
        case 2:
            return b"".join(bytes([8 * number, *[0xFF] * 9, 1]) for number in range(1, 16))
        case _:
            inner = chosen.randbytes(10)
            return b"".join(bytes([8 * number + 2, len(inner)]) + inner for number in range(1, 16))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: str(method.full_name).removeprefix("orca.v1."))
async def test_bytes_that_are_no_message(live: LiveMesh, method: MethodDescriptor) -> None:
    codes = await asyncio.gather(*(send(live, method, garbage(seed)) for seed in range(24)))
    codes += await asyncio.gather(send(live, method), send(live, method, garbage(3), garbage(2), garbage(3)))
    assert not BUGS & set(codes), codes


async def test_100_mb_in_one_message(live: LiveMesh) -> None:
    pids = {process.pid for process in live.mesh.processes.values()}
    before = {pid: psutil.Process(pid).memory_info().rss for pid in pids}
    for method in METHODS:
        # A second control stream is refused as such, whatever is in it.
        wanted = grpc.StatusCode.ABORTED if method.name == "Execute" else grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await send(live, method, bytes(100 * MIB)) is wanted, method.full_name
    after = {pid: psutil.Process(pid).memory_info().rss for pid in pids}
    assert all(after[pid] - before[pid] < 100 * MIB for pid in pids), (before, after)


async def test_nobody_has_come_to_harm(live: LiveMesh) -> None:
    assert not [line.text for line in live.lines if line.event == "rpc_failed" or line.event is None]
    await live.health(serving=True, within_s=30)  # joining is what anybody in the mesh may ask a worker for
    assert len(await live.generate("hello", max_tokens=5)) == 5
    await live.idle()
