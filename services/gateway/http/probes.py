"""``/health``, ``/ready`` and ``/version``: for load balancers and people. No token is ever spent on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.gateway.http.json_response import JsonResponse
from services.gateway.http.responses import Health, Version
from services.gateway.http.version import VERSION

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from services.gateway.readiness import Readiness

__all__ = ["OPEN_PATHS", "ProbeRoutes"]

OPEN_PATHS = frozenset({b"/health", b"/ready"})
"""What anybody may ask without a key, as written in the request."""


class ProbeRoutes:
    """The endpoints that tell how the gateway is."""

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness

    async def health(self, request: Request) -> Response:
        """Answer: this process lives."""
        del request
        return JsonResponse(Health(status="ok"))

    async def ready(self, request: Request) -> Response:
        """Answer whether a request could be served now, and what is missing where not."""
        del request
        missing = self._readiness.missing()
        if missing is None:
            return JsonResponse(Health(status="ok"))
        response = JsonResponse(Health(status="not ready", reason=str(missing)), 503)
        response.headers["retry-after"] = "1"
        return response

    async def version(self, request: Request) -> Response:
        """Answer what runs here."""
        del request
        return JsonResponse(Version(version=VERSION))
