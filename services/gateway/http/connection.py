"""One client's connection: uvicorn's protocol, and what it leaves open.

*Half-closing.* A client may say that it will send no more and still want its answer (``shutdown(SHUT_WR)``); one that
has closed its socket looks just the same. What tells them apart is an answer to something sent: the first one takes it,
the second one's host resets the connection. So a half-closed connection is sent what any client ignores, a
``100 Continue`` before the response and a comment between the events of a stream, until the response ends or a write
fails. Over TLS and for HTTP/1.0 there is nothing of the kind, and the end of what is read is the end.

*Time and size of a head.* A client has some seconds and some kilobytes for the head of each request, and as long to
send the rest of a body that was refused unread. What comes in and is neither head nor body, extensions of chunks and
trailers, has no more kilobytes, and nobody reads it: a trailer is no header.

*HTTP/1.0.* Its clients know no chunks: where a response does not know its length, it ends with the connection.

*Upgrades.* Some clients ask each time whether the server would rather speak another protocol (Java's asks for HTTP/2).
It would not: such a request is read as if it had not asked, with its body, which the parser leaves to that protocol.

Errors in the protocol itself are answered in OpenAI's shape.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from services.gateway.http.errors import HttpError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Iterator

    from starlette.types import Scope
    from uvicorn._types import ASGISendEvent
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

__all__ = ["ClientConnection", "ResponseControl", "response_control"]

HEAD_TIMEOUT_S = 20.0
MAX_HEAD_BYTES = 64 << 10
_FIELD_BYTES = 4
"""What separates name, value and line."""

_EXTENSION = "orca.response"
_UPGRADE_HEADERS = {b"upgrade", b"connection", b"http2-settings"}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b"3\r\n:\n\n\r\n"
"""A server-sent comment as a chunk."""
_PROBE_INTERVALS_S = (0.1, 1.0)
"""Probes go in pairs: the first one brings the reset, if any, the second one meets it."""


class _AnyLength(int):
    """The length of a response that ends with its connection, for a server that knows lengths and chunks only."""

    def __lt__(self, other: object) -> bool:
        """Nothing is too long."""
        return False

    def __sub__(self, other: object) -> _AnyLength:
        """Nothing is missing."""
        return self


class ResponseControl:
    """What a response may say to the connection that carries it."""

    def __init__(self, cycle: RequestResponseCycle | None = None) -> None:
        self._cycle = cycle
        self.streams_events = False
        """The response is a stream of server-sent events, which takes comments."""

    def write(self, data: bytes) -> bool:
        """Write a part of the body at once, past all that surrounds the application and looks at heads only.

        False: it must be sent as usual, since the client is slow or gone, or the body is not in chunks.
        """
        cycle = self._cycle
        if cycle is None or not cycle.chunked_encoding or cycle.flow.write_paused or cycle.disconnected:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def close_afterwards(self) -> None:
        """Let the connection end with the response that is being sent."""
        if self._cycle is not None:
            self._cycle.keep_alive = False


def response_control(scope: Scope) -> ResponseControl:
    """Return the control of a request's response; without effect under another server than ours."""
    control = scope.get("extensions", {}).get(_EXTENSION)
    return control if isinstance(control, ResponseControl) else ResponseControl()


class ClientConnection(HttpToolsProtocol):
    """The protocol of all connections."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._control = ResponseControl()
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_in_head = False
        self._num_head_bytes = 0
        """Of the fields of the head that is being read, as far as they are whole."""
        self._num_loose_bytes = 0
        """What has come since the last end of a head, piece of a body, or end of a request."""
        self._probe_timer: asyncio.TimerHandle | None = None
        self._half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        """Begin; the first head must come in time."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End: whoever serves a request of it is told."""
        self._head_came()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request."""
        if self._head_timer is None and self._is_idle:
            self._await_head()
        self._unset_keepalive_if_required()
        self._num_loose_bytes += len(data)
        self._parse(data)
        if self._num_loose_bytes > MAX_HEAD_BYTES:
            self._refuse(_too_large_head())

    def on_message_begin(self) -> None:
        """Begin with a head."""
        super().on_message_begin()
        self._is_in_head = True
        self._num_head_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Take a part of the address."""
        super().on_url(url)
        self._num_head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; a trailer is left."""
        if self._is_in_head:
            super().on_header(name, value)
            self._num_head_bytes += len(name) + len(value) + _FIELD_BYTES

    def on_headers_complete(self) -> None:
        """Begin with a request. Raises ``HttpError``, which the parser hands on."""
        self._is_in_head = False
        self._num_loose_bytes = 0
        version = self.parser.get_http_version()
        if version not in {"1.0", "1.1"}:
            raise HttpError(505, f"this server speaks HTTP/1.1, not HTTP/{version}", code="invalid_http")
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise _too_large_head()
        if self.parser.should_upgrade():
            return
        self._head_came()
        super().on_headers_complete()
        if version == "1.0":
            self.cycle.send = _unframed(self.cycle)  # type: ignore[method-assign,assignment]  # of one object
        self._control = ResponseControl(self.cycle)
        self.scope["extensions"] = {_EXTENSION: self._control}  # type: ignore[dict-item]  # one of our own

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""
        self._num_loose_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End with a request's body."""
        self._num_loose_bytes = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn always ends here
        """Take note that the client sends no more; True keeps the connection for the rest of a response."""
        waits_for_response = not self._is_idle and not self.cycle.more_body
        if not waits_for_response or self.scheme == "https" or self.scope["http_version"] != "1.1":
            return False
        if not self._half_closed:
            self._half_closed = True
            self._probe(itertools.cycle(_PROBE_INTERVALS_S))
        return True

    def on_response_complete(self) -> None:
        """End with a request; nothing comes after it from a client that has half-closed."""
        super().on_response_complete()
        if self._half_closed and self._is_idle:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(HttpError(400, msg, code="invalid_http"))

    @property
    def _is_idle(self) -> bool:
        """No request is being served."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    @staticmethod
    def _has_ended(cycle: RequestResponseCycle) -> bool:
        """Both ways: a body that was refused unread may still come after the response."""
        return cycle.response_complete and not cycle.more_body

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
            if self.parser.get_method() == b"CONNECT":
                self._refuse(HttpError(405, "this is no proxy", code="method_not_allowed"))
            else:
                self._parse_without_upgrade(rest)
        except httptools.HttpParserError as failure:
            if isinstance(failure.__context__, HttpError):
                self._refuse(failure.__context__)
            else:
                self.send_400_response("this is no HTTP request")

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """Read the head again, but for the wish, and go on with what came after it."""
        head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        head += [name + b": " + value for name, value in self.headers if name not in _UPGRADE_HEADERS]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._parse(b"\r\n".join([*head, b"", rest]))

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: HttpError) -> None:
        """Close; say why where no response is on its way that it would become a part of."""
        if self.transport.is_closing():
            return
        cycle: RequestResponseCycle | None = self.cycle
        if not self.pipeline and (cycle is None or not cycle.response_started or self._has_ended(cycle)):
            body = error.body()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    def _probe(self, intervals_s: Iterator[float]) -> None:
        """Send what a client that is still there ignores."""
        cycle = self.cycle
        if self._is_idle or self.pipeline or self.transport.is_closing():
            return
        if not cycle.response_started:
            self.transport.write(_CONTINUE)
        elif self._control.streams_events and cycle.chunked_encoding:
            self.transport.write(_COMMENT)
        self._probe_timer = self.loop.call_later(next(intervals_s), self._probe, intervals_s)


def _too_large_head() -> HttpError:
    return HttpError(431, f"the head of the request, or its trailers, have more than {MAX_HEAD_BYTES} bytes")


def _unframed(cycle: RequestResponseCycle) -> Callable[[ASGISendEvent], Coroutine[Any, Any, None]]:
    """How a response to HTTP/1.0 is sent."""
    send = cycle.send

    async def send_unframed(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            names = [name for name, _ in message.get("headers", [])]
            if b"content-length" not in names:
                cycle.chunked_encoding, cycle.expected_content_length = False, _AnyLength()
        await send(message)

    return send_unframed
