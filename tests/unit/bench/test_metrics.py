from __future__ import annotations

import json
from dataclasses import astuple, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.load.benchmark import Benchmark, BenchmarkConfig, LoadLevel, Run, check_fits
from bench.load.endpoint import Endpoint, ServedModel
from bench.load.goodput import LatencyBound, LatencyMetric
from bench.load.metrics import Distribution, Summary, summarize
from bench.load.records import Outcome, RequestRecord
from bench.load.report import MAX_FAILURES, report_of, write_json
from bench.load.request_options import RequestOptions
from bench.load.traces import TraceConfig, TraceName
from shared.errors import ConfigError

MS = 1_000_000
DOCS = Path(__file__).parents[3] / "docs" / "command-line.md"


def record(index: int = 0, *, start_ms: float = 0, events_ms: tuple[float, ...] = (), **changes: Any) -> RequestRecord:
    """Return a request that started at ``start_ms`` and had a token at each of ``events_ms`` after it."""
    times_ns = tuple(round((start_ms + at) * MS) for at in events_ms)
    made = RequestRecord(
        index=index,
        outcome=Outcome.OK,
        started_ns=round(start_ms * MS),
        sent_ns=round(start_ms * MS),
        ended_ns=times_ns[-1] if times_ns else round(start_ms * MS),
        event_times_ns=times_ns,
        num_prompt_tokens=10,
        num_output_tokens=len(times_ns),
        max_tokens=len(times_ns),
    )
    return replace(made, **changes)


def test_latencies_of_one_request() -> None:
    one = record(start_ms=5, events_ms=(30, 50, 90))
    assert (one.ttft_ms, one.e2e_ms, one.tpot_ms, one.normalised_ms) == (30, 90, 30, 30)
    single = record(events_ms=(40,))
    assert (single.ttft_ms, single.e2e_ms, single.tpot_ms, single.normalised_ms) == (40, 40, None, 40)
    textless = record(events_ms=(40,), event_times_ns=())
    assert textless.ttft_ms == textless.e2e_ms == 40


def test_tokens_are_those_of_the_server_not_events() -> None:
    bundled = record(events_ms=(30, 50), num_output_tokens=11)
    assert bundled.tpot_ms == 2
    assert summarize([bundled]).tokens_per_event == 5.5
    assert summarize([bundled]).num_output_tokens == 11


def test_a_run_in_numbers() -> None:
    records = [
        record(0, start_ms=100, events_ms=(10, 20, 40)),
        record(1, start_ms=600, events_ms=(50, 400), max_tokens=9),
        record(2, start_ms=700, outcome=Outcome.FAILED, error="HTTP 429: full", ended_ns=1100 * MS),
        record(3, start_ms=700, events_ms=(1,), outcome=Outcome.CANCELLED, num_output_tokens=0),
    ]
    summary = summarize(records, [LatencyBound.parse("ttft:20")])
    assert summary.duration_s == 1.0, "from the first start to the last end, failures included"
    assert (summary.num_requests, summary.num_ok, summary.num_failed, summary.num_cancelled) == (4, 2, 1, 1)
    assert summary.num_short == 1
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (20, 5)
    assert (summary.requests_per_s, summary.input_tokens_per_s, summary.output_tokens_per_s) == (2, 20, 5)
    assert summary.goodput_per_s == 1
    assert summary.goodput_ratio == pytest.approx(1 / 3)
    assert summary.ttft is not None
    assert astuple(summary.ttft) == pytest.approx((2, 30, 30, 46, 49.6, 50))
    assert summary.itl is not None
    assert summary.itl.num_values == 3
    assert summary.itl.mean_ms == pytest.approx((10 + 20 + 350) / 3)
    assert summary.tpot is not None
    assert summary.tpot.max_ms == 350
    assert summary.e2e is not None
    assert summary.e2e.max_ms == 400
    assert summary.normalised is not None
    assert summary.normalised.p50_ms == pytest.approx((40 / 3 + 200) / 2)
    assert [(failure.message, failure.num_requests) for failure in summary.failures] == [("HTTP 429: full", 1)]


def test_percentiles_are_numpys() -> None:
    values = [float(value) for value in np.random.default_rng(0).exponential(50, 101)]
    found = Distribution.of(values)
    assert found is not None
    ranked = sorted(values)
    mean = float(np.mean(values))
    assert astuple(found) == pytest.approx((101, mean, ranked[50], ranked[90], ranked[99], ranked[100]))
    assert Distribution.of([]) is None
    assert Distribution.of([3.0]) == Distribution(1, 3.0, 3.0, 3.0, 3.0, 3.0)


def test_a_run_of_nothing() -> None:
    summary = summarize([], [LatencyBound(LatencyMetric.E2E, 1)])
    assert (summary.duration_s, summary.requests_per_s, summary.goodput_per_s, summary.goodput_ratio) == (0, 0, 0, None)
    assert (summary.ttft, summary.tokens_per_event, summary.failures) == (None, None, ())


def test_failures_are_grouped_the_most_frequent_first() -> None:
    reasons = ["a", "b", "b", "c", "b", "c"]
    failed = [record(index, outcome=Outcome.FAILED, error=reason) for index, reason in enumerate(reasons)]
    assert [(f.message, f.num_requests) for f in summarize(failed).failures] == [("b", 3), ("c", 2), ("a", 1)]


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("ttft:500", LatencyBound(LatencyMetric.TTFT, 500)),
        ("tpot:0.5", LatencyBound(LatencyMetric.TPOT, 0.5)),
        ("e2el:1e3", LatencyBound(LatencyMetric.E2E, 1000)),
        ("normalized:20", LatencyBound(LatencyMetric.NORMALISED, 20)),
    ],
)
def test_bounds_are_written_as_vllm_writes_them(text: str, bound: LatencyBound) -> None:
    assert LatencyBound.parse(text) == bound
    assert LatencyBound.parse(str(bound)) == bound


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:", "ttft:fast", "ttft:-1", "ttft:nan", "ttft:inf", "itl:5", "TTFT:5"]
)
def test_what_is_no_bound_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="METRIC:MILLISECONDS"):
        LatencyBound.parse(text)


@pytest.mark.parametrize(("metric", "value"), [("ttft", 30), ("tpot", 15), ("e2e", 60), ("normalised", 20)])
def test_a_bound_is_kept_up_to_its_end(metric: str, value: float) -> None:
    one = record(events_ms=(30, 40, 60))
    assert LatencyBound.parse(f"{metric}:{value}").is_kept(one)
    assert not LatencyBound.parse(f"{metric}:{value - 0.01}").is_kept(one)


def test_one_token_keeps_every_bound_on_the_others() -> None:
    assert LatencyBound.parse("tpot:0.001").is_kept(record(events_ms=(5,)))


@pytest.mark.parametrize(
    ("level", "name"),
    [
        (LoadLevel(), "all at once"),
        (LoadLevel(None, 16), "16 in flight"),
        (LoadLevel(2.5), "2.5 requests/s"),
        (LoadLevel(2.0, 16), "2 requests/s, at most 16 in flight"),
    ],
)
def test_levels_have_names(level: LoadLevel, name: str) -> None:
    assert str(level) == name


def test_a_trace_must_fit_into_the_context() -> None:
    trace = TraceConfig.of(TraceName.SHARED_PREFIX, num_requests=1)
    check_fits(trace, ServedModel("m"))
    check_fits(trace, ServedModel("m", max_model_len=256 + 128 + 128))
    with pytest.raises(ConfigError, match="up to 512 tokens, the context of m has 511"):
        check_fits(trace, ServedModel("m", max_model_len=511))


def benchmark(*records: RequestRecord, runs: int = 1) -> Benchmark:
    bounds = [LatencyBound.parse("ttft:100"), LatencyBound.parse("tpot:20")]
    config = BenchmarkConfig(
        endpoint=Endpoint.parse("http://127.0.0.1:8000", api_key="secret-of-the-user"),
        options=RequestOptions("tiny"),
        trace=TraceConfig.of(TraceName.ORCA, num_requests=len(records), seed=5),
        vocab_size=300,
        levels=[LoadLevel(None, 2**index) for index in range(runs)],
        bounds=bounds,
    )
    summary = summarize(records, bounds)
    return Benchmark(
        config,
        [Run(level, 5 + index, summary, records, 0.1, was_stopped=False) for index, level in enumerate(config.levels)],
    )


def test_the_report_has_all_that_was_measured(tmp_path: Path) -> None:
    created = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
    failures = [record(i, outcome=Outcome.FAILED, error=f"reason {i}") for i in range(2, MAX_FAILURES + 5)]
    measured = benchmark(record(0, events_ms=(30, 50)), record(1, start_ms=9, events_ms=(31,)), *failures, runs=2)
    report = report_of(measured, created=created, version="1.2.3", label="before", detailed=True)
    write_json(report, tmp_path / "report.json")
    read = json.loads((tmp_path / "report.json").read_text())
    assert read["schema_version"] == 1
    assert (read["orca_version"], read["created"], read["label"]) == ("1.2.3", "2026-11-30T12:00:00+00:00", "before")
    assert read["goodput"] == {"ttft": 100, "tpot": 20}
    assert read["trace"]["input_len"] == [32, 512]
    assert [(run["max_concurrency"], run["seed"]) for run in read["runs"]] == [(1, 5), (2, 6)]
    run = read["runs"][0]
    assert {field.name for field in fields(Summary)} <= set(run)
    assert run["ttft"]["p50_ms"] == 30.5
    assert len(run["failures"]) == MAX_FAILURES
    assert len(run["requests"]) == len(failures) + 2
    assert run["requests"][1]["start_s"] == 0.009
    assert run["requests"][0]["event_times_ms"] == [30, 50]
    assert (run["requests"][2]["ttft_ms"], run["requests"][2]["error"]) == (None, "reason 2")
    assert "secret-of-the-user" not in json.dumps(read)
    assert "requests" not in report_of(measured, created=created, version="1")["runs"][0]


def test_every_field_of_the_report_is_documented() -> None:
    report = report_of(benchmark(record(events_ms=(1,))), created=datetime.now(UTC), version="1", detailed=True)

    def names(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value) | set().union(*(names(inner) for inner in value.values()))
        return set().union(*(names(inner) for inner in value)) if isinstance(value, list) else set()

    documented = DOCS.read_text(encoding="utf-8")
    assert [name for name in sorted(names(report)) if f"`{name}`" not in documented] == []
