"""Deny by default: without a known API key in the ``Authorization`` header, nothing but the list below is answered.

What is open is decided by the path as it stands in the request: no two spellings of one address, no redirect and no
method can tell the guard and the router apart. A key in the query is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.gateway.clients import bind_client
from services.gateway.http import page, probes
from services.gateway.http.errors import error_response, http_error_of
from shared.errors import UnauthenticatedError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from services.gateway.api_keys import Authenticator

__all__ = ["OPEN_PATHS", "AuthenticationMiddleware"]

OPEN_PATHS = probes.OPEN_PATHS | page.OPEN_PATHS
"""What anybody may ask without a key: whether the gateway is well, and a page without data."""


class AuthenticationMiddleware:
    """Finds out who calls, and refuses nobody known."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self._app = app
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Go on with the request of a known client, or of anybody who probes."""
        if scope["raw_path"] not in OPEN_PATHS:
            try:
                client = self._authenticator.authenticate(_authorization(scope))
            except UnauthenticatedError as refusal:
                # Sent from here, it passes through what surrounds this: a page of another origin may read it, too.
                await error_response(http_error_of(refusal))(scope, receive, send)
                return
            bind_client(client)
        await self._app(scope, receive, send)


def _authorization(scope: Scope) -> str | None:
    """Return the one header; several are as good as none, since nobody knows which is meant."""
    values: list[bytes] = [value for name, value in scope["headers"] if name == b"authorization"]
    return values[0].decode("latin-1") if len(values) == 1 else None
