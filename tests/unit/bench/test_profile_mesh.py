"""What `bench.profile_mesh` makes of tokens' arrivals and of threads' times; no mesh is needed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from bench.profile_mesh import Load, Taken, Thread, by_role, count_tokens
from shared.errors import OrcaError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
TOKEN = b'data: {"choices": [{"text":" a"}]}\n\n'


@contextlib.asynccontextmanager
async def server(data: bytes, *, ends: bool) -> AsyncIterator[str]:
    """Answer every request with some bytes, and then end or say nothing more until the client has gone."""
    connections = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        writer.write(data)
        if ends:
            writer.write_eof()
        await reader.read()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        await asyncio.gather(*(task for task in connections if task))


@pytest.mark.parametrize("size", [1, 3, 7, 8, 20, 1000])
def test_a_token_cut_in_pieces_counts_once(size: int) -> None:
    stream, tail, total = OK + 5 * TOKEN, b"", 0
    for at in range(0, len(stream), size):
        num_tokens, tail = count_tokens(tail, stream[at : at + size])
        total += num_tokens
    assert total == 5


async def test_tokens_are_counted_by_request() -> None:
    async with server(OK + 5 * TOKEN, ends=False) as url, Load(url, 2) as load:
        await load.until(5, 2)
        assert load.most_tokens == 5
        assert len(load.intervals(0, 1 << 63)) == 8
        assert load.intervals(0, 1) == []


async def test_whoever_waits_for_tokens_learns_of_a_refusal() -> None:
    refusal = b"HTTP/1.1 429 Too Many Requests\r\n\r\nno room"
    async with server(refusal, ends=False) as url, Load(url, 2) as load:
        with pytest.raises(OrcaError, match=r"refuses a request: HTTP/1.1 429"):
            await load.until(1, 1)


async def test_whoever_waits_for_tokens_learns_of_an_end() -> None:
    async with server(OK + TOKEN, ends=True) as url, Load(url, 1) as load:
        with pytest.raises(OrcaError, match="ended after 1 tokens"):
            await load.until(2, 1)


def test_threads_have_roles_by_process_place_and_work() -> None:
    loop, compute, quiet = (Thread("worker", number, number == 1, "x") for number in (1, 2, 3))
    late, gateway = Thread("worker", 4, is_main=False, name="x"), Thread("gateway", 6, is_main=False, name="x")
    before = {thread: Taken(1_000_000, 500_000) for thread in (loop, compute, quiet, gateway)}
    after = {
        loop: Taken(3_000_000, 500_000),
        compute: Taken(21_000_000, 2_500_000),
        quiet: Taken(1_400_000, 500_000),
        late: Taken(12_000_000, 0),
        gateway: Taken(41_000_000, 500_000),
    }
    busy_us, waited_us = by_role(before, after, num_iterations=10)
    assert busy_us == {
        "worker: event loop": pytest.approx(200),
        "worker: compute": pytest.approx(2_000 + 1_200),
        "worker: other threads": pytest.approx(40),
        "gateway: other threads": pytest.approx(4_000),
    }
    assert waited_us["worker: compute"] == pytest.approx(200)
