"""``GET /metrics`` for processes that speak no HTTP otherwise.

As little of HTTP as a scraper needs, on the service's own event loop: a second one would disturb gRPC's, and a thread
would see counters in the middle of a change. One request a connection; what is sent is bounded in size and time.
"""

from __future__ import annotations

import asyncio
import contextlib
from http import HTTPStatus
from typing import TYPE_CHECKING

from shared.errors import ConfigError
from shared.log import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from shared.config import ListenConfig
    from shared.metrics import ServiceMetrics

__all__ = ["metrics_served"]

_MAX_HEAD_BYTES = 16 << 10
_TIMEOUT_S = 10.0


@contextlib.asynccontextmanager
async def metrics_served(metrics: ServiceMetrics, listen: ListenConfig | None) -> AsyncIterator[None]:
    """Serve ``metrics`` for as long as the block lasts; not at all without ``listen``.

    The address is logged. Raises ``ConfigError`` where it cannot be listened at.
    """
    if listen is None:
        yield
        return
    answering: set[asyncio.Task[None]] = set()

    def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_answer(metrics, reader, writer))
        answering.add(task)
        task.add_done_callback(answering.discard)

    try:
        server = await asyncio.start_server(answer, listen.host, listen.port, limit=_MAX_HEAD_BYTES)
    except OSError as failure:
        raise ConfigError(
            f"cannot serve metrics at {_url(listen.host, listen.port)}: {failure.strerror or failure}; "
            "choose another --metrics-port (0 takes any free one) or --metrics-host"
        ) from failure
    port: int = server.sockets[0].getsockname()[1]
    get_logger().info("metrics_listening", url=_url(listen.host, port))
    try:
        yield
    finally:
        server.close()
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)
        await server.wait_closed()


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"


async def _answer(metrics: ServiceMetrics, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            writer.write(await _response(metrics, reader))
            await writer.drain()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        pass  # a scraper that leaves, or never says what it wants
    finally:
        writer.close()


async def _response(metrics: ServiceMetrics, reader: asyncio.StreamReader) -> bytes:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return _message(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    request_line, *fields = head.decode("latin-1").split("\r\n")
    match request_line.split(" "):
        case [method, target, http] if http.startswith("HTTP/1."):
            pass
        case _:
            return _message(HTTPStatus.BAD_REQUEST)
    if target.partition("?")[0] != "/metrics":
        return _message(HTTPStatus.NOT_FOUND)
    if method != "GET":
        return _message(HTTPStatus.METHOD_NOT_ALLOWED, "Allow: GET\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    body, content_type = metrics.render(headers.get("accept", ""))
    return _message(HTTPStatus.OK, f"Content-Type: {content_type}\r\n", body)


def _message(status: HTTPStatus, fields: str = "", body: bytes = b"") -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n{fields}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + body
