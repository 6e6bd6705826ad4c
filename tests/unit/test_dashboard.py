"""The Grafana dashboard asks for nothing that the services do not tell."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from services.gateway.http.metrics import HttpMetrics
from services.gateway.metrics import GatewayMetrics
from services.gateway.request_limit import RequestLimit
from services.scheduler.metrics import EngineMetrics, LoopMetrics
from services.worker.metrics import WorkerMetrics
from shared.messages import EngineStatus
from shared.metrics import ServiceMetrics
from tests.exposition import Exposition, faults
from tests.fakes.fake_scheduler import ENGINE

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "orca.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel.get("targets", ())]
METRIC = re.compile(r"\b(?:orca|process|python)_\w+")
GROUPING = re.compile(r"\bby \(([^)]*)\)")


@pytest.fixture(scope="module")
def exposition() -> Exposition:
    """All that all services tell."""
    status = EngineStatus(ready=True, reason="", epoch=1, info=ENGINE, workers=())
    metrics = ServiceMetrics("all")
    http = HttpMetrics()
    http.answered("/v1/completions", 200)
    metrics.add(
        http, GatewayMetrics(RequestLimit(1)), LoopMetrics(), EngineMetrics(lambda: status), WorkerMetrics(0, 0)
    )
    body, content_type = metrics.render()
    return Exposition.of(body.decode(), content_type)


def test_services_tell_different_things(exposition: Exposition) -> None:
    # Sums over all processes would count twice what two services tell by one name; the fixture would have failed.
    assert not faults(exposition)
    assert len(exposition.families) > 40


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_every_metric_exists(title: str, query: str, exposition: Exposition) -> None:
    names = set(METRIC.findall(query))
    assert names
    assert names <= exposition.sample_names, title
    labels = {label for family in exposition.families for sample in family.samples for label in sample.labels}
    for grouping in GROUPING.findall(query):
        assert {label.strip() for label in grouping.split(",")} <= labels


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_counters_are_looked_at_as_rates(title: str, query: str) -> None:
    if title in {"Balance", "Trouble"}:  # totals on purpose
        return
    for name in METRIC.findall(query):
        if name.endswith(("_total", "_bucket", "_sum", "_count")):
            assert re.search(rf"(rate|increase)\({name}(\{{[^}}]*\}})?\[\$__rate_interval\]\)", query), title


def test_brackets_are_balanced() -> None:
    for title, query in QUERIES:
        for opening, closing in ("()", "[]", "{}"):
            assert query.count(opening) == query.count(closing), title


def test_every_panel_has_a_place_of_its_own_and_says_what_it_is() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    places = [panel["gridPos"] for panel in PANELS]
    for one, other in itertools.combinations(places, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert all(panel["title"] for panel in PANELS)


def test_the_data_source_is_chosen_by_the_variable() -> None:
    (variable,) = DASHBOARD["templating"]["list"]
    assert (variable["name"], variable["type"], variable["query"]) == ("datasource", "datasource", "prometheus")
    sources = [panel["datasource"]["uid"] for panel in PANELS if panel["type"] != "row"]
    sources += [target["datasource"]["uid"] for panel in PANELS for target in panel.get("targets", ())]
    assert set(sources) == {"${datasource}"}


def test_what_the_issue_asks_for_is_on_it() -> None:
    shown = " ".join(query for _, query in QUERIES)
    for name in (
        *("orca_time_to_first_token_seconds", "orca_time_per_output_token_seconds", "orca_e2e_request_latency_seconds"),
        *("orca_request_queue_time_seconds", "orca_generation_tokens_total", "orca_prompt_tokens_total"),
        *("orca_num_requests_running", "orca_num_requests_waiting", "orca_kv_cache_usage_ratio"),
        *("orca_num_preemptions_total", "orca_iteration_duration_seconds", "orca_iteration_requests"),
    ):
        assert name in shown
