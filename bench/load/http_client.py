"""HTTP/1.1 with as little work as can be: a load client shares its cores with the server that it measures.

Connections are kept and used again. An answer's body is handed on as it comes, with the time when the socket had it.
Knows nothing of what is asked; does not follow redirects and uses no proxy.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, cast

import httptools

from shared.authentication import authorization_metadata
from shared.clock import SystemClock
from shared.errors import OrcaError, ProtocolError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from bench.load.endpoint import Endpoint
    from shared.clock import Clock

    OnBody = Callable[[bytes, int], None]

__all__ = ["HttpAnswer", "HttpClient"]

_MAX_KEPT_BYTES = 1 << 20
"""Of a body that is kept whole."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """How a request was answered."""

    status: int
    body: bytes
    """What was not handed on: all of it unless the status is 200 and somebody wanted it."""


class _StaleConnectionError(Exception):
    """The server had closed a kept connection before it got the request."""


@dataclass(slots=True)
class _Exchange:
    """One request on a connection, while it is answered."""

    on_body: OnBody | None
    done: asyncio.Future[HttpAnswer]
    body: bytearray = field(default_factory=bytearray)


class HttpClient:
    """A client of one endpoint, shared by any number of tasks; one connection for each request in flight."""

    def __init__(self, endpoint: Endpoint, clock: Clock | None = None) -> None:
        """``clock`` is what times of arrival are read from."""
        self._endpoint = endpoint
        self._clock = clock or SystemClock()
        self._ssl = endpoint.ssl_context()
        self._idle: list[_Connection] = []
        self._connections: set[_Connection] = set()
        headers = {"Host": endpoint.address, "Accept": "text/event-stream, application/json"}
        headers |= {name.title(): value for name, value in authorization_metadata(endpoint.api_key)}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for connection in list(self._connections):
            await connection.close()

    async def request(
        self, method: str, path: str, body: bytes | None = None, on_body: OnBody | None = None
    ) -> HttpAnswer:
        """Ask and wait for the end of the answer; ``on_body(data, time_ns)`` gets the body of one that is 200.

        Being cancelled closes the connection, and so does an ``OrcaError`` of ``on_body``, which is raised here. Where
        a kept connection breaks before anything of an answer has come, as servers close idle ones, another is tried.

        Raises:
            UnavailableError: nobody listens there, or the connection broke.
            ProtocolError: what came is not HTTP.
        """
        length = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head = f"{method} {self._endpoint.path}{path} HTTP/1.1\r\n{self._headers}{length}\r\n".encode("ascii")
        data = head + (body or b"")
        while True:
            connection = self._kept()
            if connection is None:
                return await self._exchange(await self._connect(), data, on_body)
            try:
                return await self._exchange(connection, data, on_body)
            except _StaleConnectionError:
                continue

    def _kept(self) -> _Connection | None:
        while self._idle:
            if not (connection := self._idle.pop()).is_closed:
                return connection
        return None

    async def _exchange(self, connection: _Connection, data: bytes, on_body: OnBody | None) -> HttpAnswer:
        answer = await connection.exchange(data, on_body)
        if not connection.is_closed:
            self._idle.append(connection)
        return answer

    async def _connect(self) -> _Connection:
        endpoint = self._endpoint
        loop = asyncio.get_running_loop()
        name = endpoint.host if self._ssl else None
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(endpoint.url, self._clock, self._connections),
                endpoint.host,
                endpoint.port,
                ssl=self._ssl,
                server_hostname=name,
            )
        except ssl.SSLCertVerificationError as error:
            reason = error.verify_message
            raise UnavailableError(
                f"{endpoint.url} cannot be trusted: {reason}; --tls-ca names its authority"
            ) from error
        except ssl.SSLError as error:
            raise UnavailableError(f"{endpoint.url} does not speak TLS as we do: {error.reason}") from error
        except ConnectionRefusedError as error:
            raise UnavailableError(f"nothing answers at {endpoint.url}: is the server there?") from error
        except OSError as error:
            raise UnavailableError(f"no connection to {endpoint.url}: {error.strerror or error}") from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection, and the exchange that is on it."""

    def __init__(self, url: str, clock: Clock, all_of_them: set[_Connection]) -> None:
        self._url = url
        self._clock = clock
        self._all = all_of_them
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._exchange: _Exchange | None = None
        self._num_exchanges = 0
        self._has_answer_begun = False
        self._has_framing = False
        self._arrived: deque[bytes] = deque()
        self._is_whole = self._may_be_kept = False
        self._gone = asyncio.get_running_loop().create_future()

    @property
    def is_closed(self) -> bool:
        """Whether it can take no further request."""
        return self._transport is None or self._transport.is_closing()

    async def exchange(self, data: bytes, on_body: OnBody | None) -> HttpAnswer:
        """Send a request and wait for the end of its answer."""
        assert self._transport is not None
        self._exchange = _Exchange(on_body, asyncio.get_running_loop().create_future())
        self._parser = httptools.HttpResponseParser(self)
        self._num_exchanges += 1
        self._has_answer_begun = self._has_framing = self._is_whole = self._may_be_kept = False
        self._transport.write(data)
        try:
            return await self._exchange.done
        except BaseException:
            self._transport.abort()
            raise
        finally:
            self._exchange = None

    async def close(self) -> None:
        """Close it and wait until it is."""
        if self._transport is not None:
            self._transport.abort()
            await self._gone

    # The transport calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none by name
        self._all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.discard(self)
        self._gone.set_result(None)
        if self._exchange is None:
            return
        if not self._has_answer_begun and self._num_exchanges > 1:
            self._fail(_StaleConnectionError())
        elif self._has_answer_begun and not self._has_framing and exc is None:
            self._finish()  # the end of the connection is the end of such a body
        else:
            self._fail(UnavailableError(f"{self._url} closed the connection before its answer was whole"))

    def data_received(self, data: bytes) -> None:
        now_ns = self._clock.now_ns()
        if self._exchange is None:  # nobody has asked anything
            assert self._transport is not None
            self._transport.abort()
            return
        self._has_answer_begun = True
        try:
            self._parser.feed_data(data)
            if self._arrived:
                self._deliver(self._exchange, now_ns)
        except httptools.HttpParserError as error:
            self._fail(ProtocolError(f"what answers at {self._url} does not speak HTTP: {error}"))
        except OrcaError as error:
            self._fail(error)
        else:
            if self._is_whole:
                self._finish()

    def _deliver(self, exchange: _Exchange, now_ns: int) -> None:
        body = b"".join(self._arrived)
        self._arrived.clear()
        if exchange.on_body is not None and self._parser.get_status_code() == 200:
            exchange.on_body(body, now_ns)
        elif len(exchange.body) + len(body) <= _MAX_KEPT_BYTES:
            exchange.body += body
        else:
            raise ProtocolError(f"{self._url} answered with more than {_MAX_KEPT_BYTES} bytes")

    def _finish(self) -> None:
        exchange = self._exchange
        assert exchange is not None
        assert self._transport is not None
        if not self._may_be_kept:
            self._transport.close()
        if not exchange.done.done():
            exchange.done.set_result(HttpAnswer(self._parser.get_status_code(), bytes(exchange.body)))

    def _fail(self, error: Exception) -> None:
        if self._exchange is not None and not self._exchange.done.done():
            self._exchange.done.set_exception(error)

    # The parser calls these; what they raise would be wrapped by it, so they raise nothing.

    def on_header(self, name: bytes, value: bytes) -> None:
        del value
        self._has_framing = self._has_framing or name.lower() in {b"content-length", b"transfer-encoding"}

    def on_body(self, body: bytes) -> None:
        self._arrived.append(body)

    def on_message_complete(self) -> None:
        # 1xx only says that the answer is on its way.
        self._is_whole = self._parser.get_status_code() >= 200
        self._may_be_kept = self._parser.should_keep_alive()  # the parser knows it only now
