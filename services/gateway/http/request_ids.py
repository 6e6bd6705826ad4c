"""Request ids: the client's own from ``X-Request-Id`` where it is one, else a new one; it goes back in that header."""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Scope

__all__ = ["REQUEST_ID_HEADER", "bind_request_id", "request_id_of"]

REQUEST_ID_HEADER = b"x-request-id"

_KEY = "orca.request_id"
_VALID = re.compile(rb"[\x21-\x7e]{1,128}")


def bind_request_id(scope: Scope) -> str:
    """Give a request its id, which is returned."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    given = next((value for name, value in headers if name == REQUEST_ID_HEADER), b"")
    request_id: str = given.decode("ascii") if _VALID.fullmatch(given) else secrets.token_hex(16)
    scope[_KEY] = request_id
    return request_id


def request_id_of(scope: Scope) -> str:
    """Return the id that a request was given."""
    request_id: str = scope[_KEY]
    return request_id
