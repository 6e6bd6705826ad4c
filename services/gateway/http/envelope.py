"""What every request and every response has, whatever is between: id, log line, count. The outermost layer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import structlog
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from services.gateway.http.authentication import OPEN_PATHS
from services.gateway.http.request_ids import REQUEST_ID_HEADER, bind_request_id
from shared.log import get_logger
from shared.tracing import TRACEPARENT_KEY, bind_traceparent

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Envelope"]

_CLIENT_LEFT = 499
"""nginx's status of a request whose client left before the response; only in logs."""


class Envelope:
    """Wraps the whole application. ``draining`` says whether connections must not be used again.

    ``answered`` is told the address and the status of each request that has ended.
    """

    def __init__(self, app: ASGIApp, draining: Callable[[], bool], answered: Callable[[str, int], None]) -> None:
        self._app = app
        self._draining = draining
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request to its end."""
        started = time.perf_counter()
        request_id = bind_request_id(scope)
        bind_traceparent(_traceparent(scope))
        status = _CLIENT_LEFT

        async def send_enveloped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (REQUEST_ID_HEADER, request_id.encode()),
                    *([(b"connection", b"close")] if self._draining() or _body_never_asked_for(scope, status) else []),
                ]
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_enveloped)
            except ClientDisconnect:
                pass
            finally:
                self._answered(_route(scope), status)
                log = get_logger().debug if scope["raw_path"] in OPEN_PATHS else get_logger().info
                duration_ms = round(1000 * (time.perf_counter() - started), 1)
                # As it was written, which is printable.
                path = scope["raw_path"].decode("ascii")
                log("http_request", method=scope["method"], path=path, status=status, duration_ms=duration_ms)


def _route(scope: Scope) -> str:
    """Return the address as the application knows it; "none" where it does not."""
    route = scope.get("route")
    return route.path if isinstance(route, Route) else "none"


def _traceparent(scope: Scope) -> str:
    found: bytes = next((value for name, value in scope["headers"] if name == TRACEPARENT_KEY.encode()), b"")
    return found.decode("latin-1")


def _body_never_asked_for(scope: Scope, status: int) -> bool:
    """Whether the client still waits for a word to send its body, so that the next bytes may be that or a request."""
    return status >= 400 and any(name == b"expect" for name, _ in scope["headers"])
