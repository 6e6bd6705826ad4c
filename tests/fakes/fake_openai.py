"""A scripted server of OpenAI's API over real sockets: each request is answered by a coroutine of the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from ssl import SSLContext

    Script = Callable[["Exchange"], Awaitable[None]]

__all__ = ["Exchange", "FakeOpenAi", "ReadClock", "finished", "stream", "text", "usage"]

MODEL = {"id": "tiny", "object": "model", "max_model_len": 1000, "vocab_size": 300}


def text(content: str, **more: Any) -> dict[str, Any]:
    """Return an event of a completion with a piece of text."""
    return {"choices": [{"index": 0, "text": content, "finish_reason": None, **more}], "usage": None}


def finished(content: str = "") -> dict[str, Any]:
    """Return the last event of a completion's choice."""
    return text(content, finish_reason="length")


def usage(prompt: int, output: int) -> dict[str, Any]:
    """Return the event with the number of tokens."""
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": 0}}


class ReadClock:
    """A clock that a test sets, and that tells when it is read."""

    def __init__(self) -> None:
        self.time_ms = 0.0
        self._read = asyncio.Event()

    def now_ns(self) -> int:
        self._read.set()
        return round(self.time_ms * 1e6)

    def set(self, time_ms: float) -> None:
        self.time_ms = time_ms
        self._read.clear()

    async def read(self) -> None:
        """Wait until it has been read since it was set."""
        async with asyncio.timeout(10):
            await self._read.wait()


@dataclass
class Exchange:
    """A request, and the means to answer it."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    connection: int
    """How many connections there were before this one."""
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    has_begun: bool = False

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        """Answer in one piece."""
        head = f"HTTP/1.1 {status} Said\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
        await self.raw(head.encode() + body)

    async def events(self, *events: dict[str, Any] | str) -> None:
        """Send server-sent events, the head of the answer with the first of them, all in one write."""
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        data = b"".join(
            b"data: " + (event if isinstance(event, str) else json.dumps(event)).encode() + b"\n\n" for event in events
        )
        begin, self.has_begun = b"" if self.has_begun else head, True
        await self.raw(begin + f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def end(self) -> None:
        """End the answer."""
        await self.events("[DONE]")
        await self.raw(b"0\r\n\r\n")

    async def left(self) -> None:
        """Wait until the client has gone."""
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                assert await self.reader.read() == b""

    def cut(self) -> None:
        """Break the connection."""
        self.writer.transport.abort()


async def stream(exchange: Exchange) -> None:
    """Answer with as many tokens as are asked for, one an event."""
    num_tokens = exchange.body["max_tokens"]
    await exchange.events(*[text("a")] * (num_tokens - 1), finished("a"))
    await exchange.events(usage(len(exchange.body["prompt"]), num_tokens))
    await exchange.end()


@dataclass
class FakeOpenAi:
    """What it answers with, and what it was asked."""

    script: Script = stream
    models: bytes = json.dumps({"object": "list", "data": [MODEL]}).encode()
    models_status: int = 200
    url: str = ""
    asked: list[Exchange] = field(default_factory=list)
    """Completions and conversations."""
    num_connections: int = 0
    failures: list[BaseException] = field(default_factory=list)
    """Of scripts."""

    @contextlib.asynccontextmanager
    async def serving(self, tls: SSLContext | None = None) -> AsyncIterator[FakeOpenAi]:
        """Listen at a free port for as long as the block lasts; what a script raised is raised at the end."""
        connections: set[asyncio.Task[None]] = set()

        def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.add(asyncio.create_task(self._connection(reader, writer)))

        server = await asyncio.start_server(take, "127.0.0.1", 0, ssl=tls)
        port = server.sockets[0].getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        try:
            yield self
        finally:
            server.close()
            for connection in connections:
                connection.cancel()
            await asyncio.gather(*connections, return_exceptions=True)
            await server.wait_closed()
        if self.failures:
            raise self.failures[0]

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.num_connections = self.num_connections, self.num_connections + 1
        try:
            while not writer.is_closing():
                exchange = await _request(reader, writer, number)
                if exchange.method == "GET":
                    await exchange.answer(self.models_status, self.models)
                    continue
                self.asked.append(exchange)
                await self.script(exchange)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        except Exception as error:  # noqa: BLE001 - told at the end, where the test sees it
            self.failures.append(error)
        finally:
            writer.transport.abort()


async def _request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int) -> Exchange:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    method, path, _ = first.split(" ")
    return Exchange(method, path, headers, json.loads(body or b"{}"), connection, reader, writer)
