"""Clients that leave, that stop sending, and that do not read."""

from __future__ import annotations

import asyncio
import socket
import struct
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from shared.generation import Delta
from tests.fakes.fake_generation import last

if TYPE_CHECKING:
    from tests.fakes.fake_generation import Call
    from tests.service.gateway.http.conftest import RunningFront

SOON_S = 1.0
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}
each_way = pytest.mark.parametrize(("path", "stream"), [(path, stream) for path in BODIES for stream in (True, False)])


async def ask(
    front: RunningFront, path: str, *, stream: bool
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Call]:
    reader, writer = await front.connect()
    writer.write(front.raw(path, BODIES[path] | {"stream": stream}))
    return reader, writer, await front.generation.call()


def vanish(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    """Close the socket at once, as the kernel does for a process that dies."""
    if reset:
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@each_way
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("when", ["queued", "accepted", "running"])
async def test_leaving_ends_the_request_at_once(
    front: RunningFront, path: str, stream: bool, reset: bool, when: str
) -> None:
    reader, writer, call = await ask(front, path, stream=stream)
    if when != "queued":
        call.accept()
    if when == "running":
        call.send(Delta("hello"))
        if stream:
            await reader.readuntil(b"hello")
    vanish(writer, reset=reset)
    await asyncio.wait_for(call.closed.wait(), SOON_S)


@each_way
async def test_the_sdk_giving_up_ends_the_request_at_once(front: RunningFront, path: str, stream: bool) -> None:
    asking = asyncio.create_task(front.post(path, BODIES[path] | {"stream": stream}))
    call = await front.generation.call()
    asking.cancel()
    await asyncio.wait([asking])
    await asyncio.wait_for(call.closed.wait(), SOON_S)


@each_way
async def test_half_closing_is_not_leaving(front: RunningFront, path: str, stream: bool) -> None:
    reader, writer, call = await ask(front, path, stream=stream)
    writer.write_eof()
    # Long enough for two probes, which show that the client is still there.
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(call.closed.wait(), 0.3)
    call.accept()
    call.send(Delta("hello"), last(" world"))
    answer = await asyncio.wait_for(reader.read(), SOON_S)
    writer.close()
    await writer.wait_closed()
    final = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert final.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b" world" in final
    if stream:
        assert b"data: [DONE]\n\n" in final


@pytest.mark.parametrize("path", BODIES)
async def test_half_closing_in_a_stream_is_not_leaving(front: RunningFront, path: str) -> None:
    reader, writer, call = await ask(front, path, stream=True)
    call.accept()
    call.send(Delta("hello"))
    await reader.readuntil(b"hello")
    writer.write_eof()
    assert await reader.readuntil(b"\n:\n\n\r\n"), "a comment between the events"
    call.send(last(" world"))
    rest = await asyncio.wait_for(reader.read(), SOON_S)
    assert b" world" in rest
    assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    writer.close()
    await writer.wait_closed()


@each_way
async def test_leaving_after_half_closing_ends_the_request(front: RunningFront, path: str, stream: bool) -> None:
    reader, writer, call = await ask(front, path, stream=stream)
    call.accept()
    writer.write_eof()
    await reader.readuntil(b"HTTP/1.1 ")
    vanish(writer, reset=False)
    await asyncio.wait_for(call.closed.wait(), 2 * SOON_S)


async def test_half_closing_within_the_body_is_leaving(front: RunningFront) -> None:
    reader, writer = await front.connect()
    writer.write(front.raw("/v1/completions", {"prompt": "x"}, length=1000))
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), SOON_S) == b""
    writer.close()
    await writer.wait_closed()


async def test_who_does_not_read_gets_no_more(front: RunningFront) -> None:
    """The front takes deltas only as fast as they are read, so that they pile up, merged, where memory is bounded."""
    _, writer, call = await ask(front, "/v1/completions", stream=True)
    writer.transport.pause_reading()  # type: ignore[attr-defined]  # the transport of a socket reads, too
    call.accept()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        delta = Delta("x" * 65536)
        call.send(*[delta] * 1000)
        taken = -1
        while taken != call.num_taken:
            taken = call.num_taken
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call.closed.wait(), 0.2)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 300, "64 MiB were on offer"
    assert after - before < 16 << 20
    vanish(writer, reset=True)
    await asyncio.wait_for(call.closed.wait(), SOON_S)
