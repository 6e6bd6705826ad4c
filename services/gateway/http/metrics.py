"""``/metrics`` on the HTTP front: what the gateway tells Prometheus, to whoever has a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

if TYPE_CHECKING:
    from starlette.requests import Request

    from shared.metrics import ServiceMetrics

__all__ = ["metrics_routes"]


def metrics_routes(metrics: ServiceMetrics) -> list[Route]:
    """Return the route."""

    async def answer(request: Request) -> Response:
        body, content_type = metrics.render(request.headers.get("accept", ""))
        # As it is: Starlette would add a charset of its own to the content type.
        return Response(body, headers={"content-type": content_type, "cache-control": "no-store"})

    return [Route("/metrics", answer, methods=["GET"])]
