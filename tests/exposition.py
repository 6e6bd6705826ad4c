"""Reading what a service exposes to Prometheus, and what `promtool check metrics` would say about it."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from typing import TYPE_CHECKING

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import structlog
    from prometheus_client.core import Metric

__all__ = ["OPENMETRICS", "Exposition", "faults", "metrics_url", "scrape"]

OPENMETRICS = "application/openmetrics-text; version=1.0.0"

LABELS = {
    *("le", "code", "dtype", "method", "model", "num_stages", "python", "reason", "route", "service", "stage"),
    *("state", "status", "tp_rank", "tp_size", "version"),
}
"""Each takes few values."""
LIBRARY_FAMILIES = ("process_", "python_")
UNITS = re.compile(r"_(milliseconds?|ms|us|ns|minutes|hours|kilobytes|mib|percent|perc)(_|$)")
HISTOGRAM_UNITS = ("_seconds", "_tokens", "_requests")
RULES: dict[str, Callable[[Metric], bool]] = {
    "ours begin with orca_": lambda family: family.name.startswith("orca_"),
    "HELP is a sentence": lambda family: family.documentation.endswith("."),
    "base units are seconds, bytes and ratios": lambda family: not UNITS.search(family.name),
    "TYPE is known": lambda family: family.type != "unknown",
    "a histogram names its unit": lambda family: family.type != "histogram" or family.name.endswith(HISTOGRAM_UNITS),
    "counters end in _total, and nothing else does": lambda family: all(
        sample.name.endswith("_total") == (family.type == "counter") for sample in family.samples
    ),
    "labels take few values": lambda family: all(set(sample.labels) <= LABELS for sample in family.samples),
}


class Exposition:
    """The samples of one scrape."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self.families = list(families)

    @classmethod
    def of(cls, body: str, content_type: str = "text/plain") -> Exposition:
        parse = parse_openmetrics if content_type.startswith("application/openmetrics-text") else parse_text
        return cls(parse(body))

    @property
    def sample_names(self) -> set[str]:
        return {sample.name for family in self.families for sample in family.samples}

    def value(self, name: str, **labels: str) -> float:
        """The one sample of this name and exactly these labels."""
        (value,) = (value for found, value in self.values(name) if found == labels)
        return value

    def total(self, name: str) -> float:
        """The sum over all labels."""
        return sum(value for _, value in self.values(name))

    def values(self, name: str) -> list[tuple[Mapping[str, str], float]]:
        return [
            (sample.labels, sample.value)
            for family in self.families
            for sample in family.samples
            if sample.name == name
        ]


def faults(exposition: Exposition) -> list[str]:
    """What breaks the conventions of Prometheus, or ours."""
    return [
        f"{family.name}: {rule}"
        for family in exposition.families
        if not family.name.startswith(LIBRARY_FAMILIES)
        for rule, keeps in RULES.items()
        if not keeps(family)
    ]


async def scrape(url: str, accept: str = "") -> Exposition:
    """Scrape and parse."""

    def get() -> tuple[str, str]:
        request = urllib.request.Request(url, headers={"Accept": accept} if accept else {})
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.read().decode(), response.headers["Content-Type"]

    return Exposition.of(*await asyncio.to_thread(get))


def metrics_url(logs: Iterable[structlog.typing.EventDict]) -> str:
    """Where a service of this process serves its metrics, from what it logged."""
    for event in logs:
        if event["event"] == "metrics_listening":
            return str(event["url"])
    pytest.fail("no metrics_listening event")
