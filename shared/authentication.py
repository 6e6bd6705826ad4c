"""Deny by default: a server that authenticates does so for every call, whatever its method.

Reflection and methods that do not exist are no exception; what is open without a key is the list below. It does not
know what a key is: the service says so by a function that gets the ``authorization`` metadata of a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
from grpc import aio

from shared.errors import ConfigError, UnauthenticatedError
from shared.failure_details import failure_metadata

if TYPE_CHECKING:
    from collections.abc import Callable

    Authenticate: TypeAlias = Callable[[str | None], None]

__all__ = ["AUTHORIZATION_KEY", "OPEN_METHODS", "AuthenticationInterceptor", "authorization_metadata"]

AUTHORIZATION_KEY = "authorization"
"""Metadata key, that of the HTTP header."""

OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})
"""What probes need, and tells no more than whether the service is ready."""


class AuthenticationInterceptor(aio.ServerInterceptor):
    """Refuses calls before their message is read.

    ``authenticate`` raises ``UnauthenticatedError``, or returns, and what it has put into context variables is there in
    the call's handler.
    """

    def __init__(self, authenticate: Authenticate) -> None:
        self._authenticate = authenticate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Go on with the call, or answer it with UNAUTHENTICATED."""
        if handler_call_details.method not in OPEN_METHODS:
            try:
                self._authenticate(_authorization(handler_call_details))
            except UnauthenticatedError as refusal:
                return _refusing(refusal)
        return await continuation(handler_call_details)


def authorization_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a client's calls. Raises ``ConfigError`` for what no header can carry."""
    if not api_key:
        return ()
    if not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
        raise ConfigError("the API key has characters that no header carries; it is printable ASCII without spaces")
    return ((AUTHORIZATION_KEY, f"Bearer {api_key}"),)


def _authorization(details: grpc.HandlerCallDetails) -> str | None:
    """Return the one value; several are as good as none, since nobody knows which is meant."""
    values = [value for key, value in details.invocation_metadata or () if key == AUTHORIZATION_KEY]
    if len(values) != 1:
        return None
    return values[0] if isinstance(values[0], str) else values[0].decode("latin-1")


def _refusing(refusal: UnauthenticatedError) -> Any:
    async def refuse(requests: Any, context: aio.ServicerContext[Any, Any]) -> None:
        del requests
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(refusal), failure_metadata(refusal))

    # Of a kind that is answered before anything is read, whatever kind the method is.
    return grpc.stream_stream_rpc_method_handler(refuse)
