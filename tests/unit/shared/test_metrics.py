from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as LibraryHistogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from structlog.testing import capture_logs

from shared.config import ListenConfig, ObservabilityConfig
from shared.errors import ConfigError
from shared.metrics import (
    COUNT_BOUNDS,
    FIRST_TOKEN_BOUNDS_S,
    REQUEST_BOUNDS_S,
    STEP_BOUNDS_S,
    TOKEN_BOUNDS_S,
    Histogram,
    ServiceMetrics,
)
from shared.metrics_server import metrics_served
from tests.exposition import OPENMETRICS, Exposition, faults, metrics_url, scrape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

ANY_PORT = ListenConfig(port=0)


class Gauges(Collector):
    """Collects by hand, and says how often."""

    def __init__(self) -> None:
        self.num_scrapes = 0

    def collect(self) -> Iterable[Metric]:
        self.num_scrapes += 1
        yield GaugeMetricFamily("orca_scrapes", "Scrapes.", self.num_scrapes)


@given(st.lists(st.tuples(st.floats(0, 100) | st.sampled_from(STEP_BOUNDS_S), st.integers(1, 5))))
def test_a_histogram_is_that_of_the_library(observations: list[tuple[float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("x_seconds", "X.", STEP_BOUNDS_S)
    ours.register(histogram)
    library = LibraryHistogram("x_seconds", "X.", buckets=STEP_BOUNDS_S, registry=theirs)
    for value, count in observations:
        histogram.observe(value, count)
        for _ in range(count):
            library.observe(value)
    found = Exposition.of(generate_latest(ours).decode())
    wanted = Exposition.of(generate_latest(theirs).decode())
    assert found.values("x_seconds_bucket") == wanted.values("x_seconds_bucket")
    assert found.value("x_seconds_sum") == pytest.approx(wanted.value("x_seconds_sum"))
    assert found.value("x_seconds_count") == wanted.value("x_seconds_count") == histogram.count


def test_constant_labels_are_on_every_sample() -> None:
    registry = CollectorRegistry()
    registry.register(Histogram("x_seconds", "X.", (1.0,), {"stage": "1"}))
    samples = [sample for family in registry.collect() for sample in family.samples]
    assert all(sample.labels["stage"] == "1" for sample in samples)
    assert {sample.name for sample in samples} == {"x_seconds_bucket", "x_seconds_count", "x_seconds_sum"}


@pytest.mark.parametrize(
    "bounds", [COUNT_BOUNDS, FIRST_TOKEN_BOUNDS_S, REQUEST_BOUNDS_S, STEP_BOUNDS_S, TOKEN_BOUNDS_S]
)
def test_bounds_rise(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain"),
        ("*/*", "text/plain"),
        ("text/plain;version=0.0.4", "text/plain"),
        (OPENMETRICS, "application/openmetrics-text"),
        # What Prometheus 3 sends.
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3",
            "application/openmetrics-text",
        ),
    ],
)
def test_formats(accept: str, content_type: str) -> None:
    body, found = ServiceMetrics("gateway").render(accept)
    assert found.startswith(content_type)
    exposition = Exposition.of(body.decode(), found)
    assert not faults(exposition)
    ((build, one),) = exposition.values("orca_build_info")
    assert build["service"] == "gateway"
    assert one == 1
    assert "process_cpu_seconds_total" in exposition.sample_names


@pytest.mark.parametrize(
    "text",
    [
        "# HELP x_total X.\n# TYPE x_total counter\nx_total 1\n",
        "# TYPE orca_x gauge\norca_x 1\n",
        "# HELP orca_x_ms X.\n# TYPE orca_x_ms gauge\norca_x_ms 1\n",
        "# HELP orca_x X.\norca_x 1\n",
        "# HELP orca_x_total X.\n# TYPE orca_x_total gauge\norca_x_total 1\n",
        '# HELP orca_x X.\n# TYPE orca_x gauge\norca_x{request_id="7"} 1\n',
        '# HELP orca_x X.\n# TYPE orca_x histogram\norca_x_bucket{le="+Inf"} 1\norca_x_count 1\norca_x_sum 1\n',
    ],
)
def test_the_lint_sees_a_bad_sample(text: str) -> None:
    assert faults(Exposition.of(text))


def test_two_services_of_one_process_share_nothing() -> None:
    first, second = ServiceMetrics("gateway"), ServiceMetrics("worker")
    first.add(Gauges())
    assert b"orca_scrapes" in first.render()[0]
    assert b"orca_scrapes" not in second.render()[0]


def test_a_name_is_taken_once() -> None:
    metrics = ServiceMetrics("gateway")
    metrics.add(Gauges())
    with pytest.raises(ValueError, match="orca_scrapes"):
        metrics.add(Gauges())


async def test_a_scraper_gets_what_it_prefers() -> None:
    metrics = ServiceMetrics("gateway")
    metrics.add(Gauges())
    with capture_logs() as logs:
        async with metrics_served(metrics, ANY_PORT):
            url = metrics_url(logs)
            before = (await scrape(url)).value("orca_scrapes")
            assert (await scrape(f"{url}?x=1", OPENMETRICS)).value("orca_scrapes") == before + 1


async def test_nothing_is_served_unless_asked() -> None:
    with capture_logs() as logs:
        async with metrics_served(ServiceMetrics("gateway"), None):
            pass
    assert not logs


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\n\r\n", b"200 OK"),
        (b"GET / HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405 Method Not Allowed"),
        (b"nonsense\r\n\r\n", b"400 Bad Request"),
        (b"GET /metrics SSH/2\r\n\r\n", b"400 Bad Request"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * (64 << 10) + b"\r\n\r\n", b"431 Request Header Fields Too Large"),
    ],
)
async def test_answers(request_: bytes, status: bytes) -> None:
    with capture_logs() as logs:
        async with metrics_served(ServiceMetrics("gateway"), ANY_PORT):
            host, port = metrics_url(logs).removeprefix("http://").removesuffix("/metrics").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(request_)
            assert (await reader.readline()).strip() == b"HTTP/1.1 " + status
            writer.close()


async def test_leaving_does_not_wait_for_a_silent_scraper() -> None:
    with capture_logs() as logs:
        async with metrics_served(ServiceMetrics("gateway"), ANY_PORT):
            host, port = metrics_url(logs).removeprefix("http://").removesuffix("/metrics").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /met")
            await writer.drain()
            await scrape(metrics_url(logs))  # by now the silent one has been accepted
    assert await reader.read() == b""
    writer.close()


async def test_a_taken_port_is_told() -> None:
    with capture_logs() as logs:
        async with metrics_served(ServiceMetrics("gateway"), ANY_PORT):
            port = int(metrics_url(logs).removesuffix("/metrics").rpartition(":")[2])
            with pytest.raises(ConfigError, match=f"127.0.0.1:{port}/metrics.*--metrics-port"):
                async with metrics_served(ServiceMetrics("worker"), ListenConfig(port=port)):
                    pass


def test_a_collector_is_named_by_its_url() -> None:
    assert ObservabilityConfig(otlp_endpoint="http://collector:4318").otlp_endpoint
    with pytest.raises(ConfigError, match="--otlp-endpoint must be a URL"):
        ObservabilityConfig(otlp_endpoint="collector:4317")
