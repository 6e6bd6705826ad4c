"""``/metrics`` on the HTTP front, for whoever has a key, and what the front itself counts.

A request that never becomes one of the engine's, since its body or its key is no good, is in these counts only.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.routing import Route

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric
    from starlette.requests import Request

    from shared.metrics import ServiceMetrics

__all__ = ["HttpMetrics", "metrics_routes"]


class HttpMetrics(Collector):
    """Requests of the front that have ended."""

    def __init__(self) -> None:
        self._num_answered: Counter[tuple[str, int]] = Counter()

    def answered(self, route: str, status: int) -> None:
        """A request has ended. ``route`` is the address as the front knows it, never as the client wrote it."""
        self._num_answered[route, status] += 1

    def collect(self) -> Iterable[Metric]:
        """Give all as it is now."""
        family = CounterMetricFamily(
            "orca_http_requests",
            "HTTP requests that have ended, by address and status; 499 where the client left before.",
            labels=["route", "status"],
        )
        for (route, status), count in self._num_answered.items():
            family.add_metric([route, str(status)], count)
        return [family]


def metrics_routes(metrics: ServiceMetrics) -> list[Route]:
    """Return the route."""

    async def answer(request: Request) -> Response:
        body, content_type = metrics.render(request.headers.get("accept", ""))
        # As it is: Starlette would add a charset of its own to the content type.
        return Response(body, headers={"content-type": content_type, "cache-control": "no-store"})

    return [Route("/metrics", answer, methods=["GET"])]
