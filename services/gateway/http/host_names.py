"""Under which names the front may be called where only programs of this host reach it, and any of them may call.

A page of any site can have that site's own name mean 127.0.0.1 ("DNS rebinding"). What it asks then is of its own
origin, so that no rule for other origins holds it back, but the browser still tells the name. Names that nobody can own
pass: addresses, names without a dot, localhost and what is below it.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from services.gateway.http.errors import HttpError, error_response

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["HostNameMiddleware"]


class HostNameMiddleware:
    """Refuses requests to other names; over TLS there is no need to, since no other name has the certificate."""

    def __init__(self, app: ASGIApp, allowed: Iterable[str]) -> None:
        """``allowed`` names pass, too."""
        self._app = app
        self._allowed = frozenset(map(str.lower, allowed))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Go on with a request to a name of ours."""
        if scope["scheme"] == "http":
            for name, value in scope["headers"]:
                if name == b"host" and not self._is_ours(value.decode("latin-1")):
                    await error_response(_refusal(value.decode("latin-1")))(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _is_ours(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        except ValueError:
            return False
        return "." not in name or name.endswith(".localhost") or name in self._allowed or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refusal(host: str) -> HttpError:
    return HttpError(
        403,
        f"this gateway is for its own host and has no API keys, so it does not answer to {host[:100]!r}; call it as "
        "localhost or by its address, or start it with --allowed-host and that name, or with --api-keys",
        "permission_error",
        code="host_not_allowed",
    )
