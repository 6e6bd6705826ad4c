"""The page at ``/``: a chat playground and the live view of the mesh, in files that hold no data.

Anybody may load it, key or not; what it shows comes from the API and from `mesh_feed`, and those ask for the key. It
takes nothing from elsewhere, and its content security policy holds it to that.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["OPEN_PATHS", "page_routes"]

_FOLDER = Path(__file__).parent / "static"
_INDEX = "index.html"
_MEDIA_TYPES = {
    _INDEX: "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(
        ("app.js", "chat.js", "events.js", "markdown.js", "mesh.js", "theme.js", "timeline.js"),
        "text/javascript; charset=utf-8",
    ),
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # Asked for each time, and not sent again where nothing has changed: page and gateway are of one version.
    "cache-control": "no-cache",
}


def _path(name: str) -> str:
    return "/" if name == _INDEX else f"/static/{name}"


OPEN_PATHS = frozenset(_path(name).encode() for name in _MEDIA_TYPES)
"""What anybody may ask without a key, as written in the request."""


@dataclass(frozen=True, slots=True)
class _File:
    """One file of the page, kept in memory."""

    content: bytes
    media_type: str
    etag: str

    async def serve(self, request: Request) -> Response:
        """Send it, unless the browser has it."""
        headers = _HEADERS | {"etag": self.etag}
        if self.etag in (tag.strip() for tag in request.headers.get("if-none-match", "").split(",")):
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def page_routes() -> list[Route]:
    """Read the page's files; raises ``OSError`` where they are not installed."""
    return [
        Route(_path(name), _read(name, media_type).serve, methods=["GET"]) for name, media_type in _MEDIA_TYPES.items()
    ]


def _read(name: str, media_type: str) -> _File:
    content = (_FOLDER / name).read_bytes()
    return _File(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
