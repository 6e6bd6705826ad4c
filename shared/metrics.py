"""Metrics of one process, in the text formats of Prometheus and OpenMetrics.

A service counts on its event loop and is rendered there, so what one scrape says belongs to one moment: sums that must
balance do balance. Nothing is global: each ``ServiceMetrics`` has a registry of its own. Labels take few values; what
is different for each request (ids, texts, keys) is never one.

Latencies have the buckets that dashboards of the field know (vLLM's).
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from importlib.metadata import version
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from prometheus_client.core import Metric

__all__ = [
    "COUNT_BOUNDS",
    "FIRST_TOKEN_BOUNDS_S",
    "REQUEST_BOUNDS_S",
    "STEP_BOUNDS_S",
    "TOKEN_BOUNDS_S",
    "Histogram",
    "ServiceMetrics",
]

FIRST_TOKEN_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS_S = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_BOUNDS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0),
)
"""Of one iteration or one step of a worker."""
COUNT_BOUNDS = tuple(float(1 << power) for power in range(17))
"""Tokens or requests: 1, 2, 4 … 65536."""


class Histogram(Collector):
    """Observations by size, for one thread.

    The library's own takes a lock and looks at its buckets one after the other; this one is for what happens with
    every token. Several equal observations are made at once.
    """

    def __init__(
        self, name: str, documentation: str, bounds: Sequence[float], labels: Mapping[str, str] | None = None
    ) -> None:
        """``bounds`` are the upper ends of the buckets, rising; ``labels`` are constant."""
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(bounds)
        self._labels = dict(labels or {})
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add ``count`` observations of ``value``."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self._counts)

    def collect(self) -> Iterable[Metric]:
        """Give the histogram as it is now."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=list(self._labels))
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        totals = [float(total) for total in accumulate(self._counts)]
        family.add_metric(list(self._labels.values()), list(zip(bounds, totals, strict=True)), self._sum)
        return [family]


class _Build(Collector):
    """Which build of which service this is."""

    def __init__(self, service: str) -> None:
        self._info = {
            "service": service,
            "version": version("orca-mesh"),
            "python": platform.python_version(),
        }

    def collect(self) -> Iterable[Metric]:
        return [InfoMetricFamily("orca_build", "What runs here.", self._info)]


class ServiceMetrics:
    """All metrics of a process: its own, the build's and those of the process itself."""

    def __init__(self, service: str, *collectors: Collector) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self.add(_Build(service), *collectors)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def add(self, *collectors: Collector) -> None:
        """Render these, too. Raises ``ValueError`` where a name is taken."""
        for collector in collectors:
            self._registry.register(collector)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the exposition and its content type, as an ``Accept`` header prefers: OpenMetrics or plain text."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type
