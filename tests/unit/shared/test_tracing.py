from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from shared.clock import SystemClock
from shared.config import ObservabilityConfig
from shared.errors import ConfigError
from shared.tracing import Span, TraceContext, bind_traceparent, calling_traceparent, open_tracer
from tests.fakes.otlp_collector import OtlpCollector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shared.tracing import Tracer

CLOCK = SystemClock()
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


@pytest.fixture(autouse=True)
def no_standard_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as running:
        yield running


def tracer_to(collector: OtlpCollector, **attributes: str) -> Tracer:
    tracer = open_tracer("gateway", ObservabilityConfig(otlp_endpoint=collector.endpoint), CLOCK, **attributes)
    assert tracer is not None
    return tracer


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_a_traceparent_is_read_as_it_was_written(trace_id: int, span_id: int, is_sampled: bool) -> None:
    context = TraceContext(trace_id, span_id, is_sampled)
    assert TraceContext.parse(str(context)) == context


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        CLIENT.upper(),
        f"ff{CLIENT[2:]}",
        f"{CLIENT}-more",  # version 00 has four parts
        CLIENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        CLIENT.replace("b7ad6b7169203331", "0" * 16),
        f"01{CLIENT[2:]}-{'x' * 1000}",
        f"{CLIENT}\n",
    ],
)
def test_what_is_no_traceparent_is_ignored(text: str) -> None:
    assert TraceContext.parse(text) is None


def test_later_versions_may_have_more_parts() -> None:
    assert TraceContext.parse(f"01{CLIENT[2:]}-more") == TraceContext.parse(CLIENT)


def test_the_calls_span_is_bound_to_the_task() -> None:
    assert calling_traceparent() == ""
    bind_traceparent(CLIENT)
    assert calling_traceparent() == CLIENT
    bind_traceparent("")


def test_traces_are_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_tracer("gateway", ObservabilityConfig(), CLOCK) is None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert open_tracer("gateway", ObservabilityConfig(otlp_endpoint="http://collector:4318"), CLOCK) is None


def test_nothing_is_imported_for_traces_that_nobody_wants() -> None:
    script = (
        "import sys, services.gateway.app, services.scheduler.app, services.worker.tracing; "
        "print(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "shared.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[otel\]'"):
        open_tracer("gateway", ObservabilityConfig(otlp_endpoint="http://collector:4318"), CLOCK)


async def test_a_tree_of_spans(collector: OtlpCollector) -> None:
    tracer = tracer_to(collector, stage="1")
    before_ns, start_ns = time.time_ns(), CLOCK.now_ns()
    root = tracer.begin(CLIENT)
    tracer.record(Span("queue", start_ns, start_ns + 1_000_000, parent=root, attributes={"orca.n": 3}))
    tracer.record(
        Span(
            "chat",
            start_ns,
            start_ns + 2_000_000,
            parent=CLIENT,
            traceparent=root,
            is_entry=True,
            events=(("first_token", start_ns + 1_000_000),),
            error="it went wrong",
        )
    )
    await tracer.close()
    assert set(collector.paths) == {"/v1/traces"}
    (queue,), (chat,) = collector.named("queue"), collector.named("chat")
    client = TraceContext.parse(CLIENT)
    assert client is not None
    assert {queue.trace_id, chat.trace_id} == {f"{client.trace_id:032x}"}
    assert chat.parent_id == f"{client.span_id:016x}"
    assert queue.parent_id == chat.span_id
    assert (queue.attributes, queue.error) == ({"orca.n": 3}, "")
    assert (chat.events, chat.error, chat.kind, chat.service) == (("first_token",), "it went wrong", 2, "orca-gateway")
    assert chat.end_ns - chat.start_ns == 2_000_000
    assert abs(chat.start_ns - before_ns) < 10**9, "epoch time"


async def test_a_trace_begins_where_the_client_has_none(collector: OtlpCollector) -> None:
    tracer = tracer_to(collector)
    first, second = tracer.begin(), tracer.begin("nonsense")
    for traceparent in (first, second):
        tracer.record(Span("chat", 1, 2, traceparent=traceparent))
    await tracer.close()
    assert [span.parent_id for span in collector.spans] == ["", ""]
    assert len({span.trace_id for span in collector.spans}) == 2
    assert {f"00-{span.trace_id}-{span.span_id}-01" for span in collector.spans} == {first, second}


async def test_samplers_are_heeded(collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = tracer_to(collector)
    assert tracer.begin(UNSAMPLED) == "", "the client does not record this one"
    await tracer.close()
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    tracer = tracer_to(collector)
    assert tracer.begin() == ""
    assert tracer.begin(CLIENT) != ""
    await tracer.close()


async def test_standard_variables_are_heeded(collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{collector.endpoint}/base")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracer = open_tracer("gateway", ObservabilityConfig(), CLOCK)
    assert tracer is not None
    tracer.record(Span("chat", 1, 2))
    await tracer.close()
    assert collector.paths == ["/base/v1/traces"]
    assert collector.spans[0].service == "mine"


async def test_a_collector_that_is_away_holds_nobody_up(
    collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.otlp._CLOSE_TIMEOUT_S", 0.2)
    collector.status = 503  # the library tries again, for longer than anybody wants to wait
    with capture_logs() as logs:
        tracer = tracer_to(collector)
        tracer.record(Span("chat", 1, 2))
        began = time.monotonic()
        await tracer.close()
        assert time.monotonic() - began < 10
    assert {event["event"] for event in logs} == {"trace_export_failed"}
    assert [event["log_level"] for event in logs].count("warning") <= 1, "one line for what is lost, not for each try"


async def test_a_collector_that_refuses_is_told_in_our_log(collector: OtlpCollector) -> None:
    collector.status = 400
    with capture_logs() as logs:
        tracer = tracer_to(collector)
        tracer.record(Span("chat", 1, 2))
        await tracer.close()
    (event,) = logs
    assert (event["event"], event["log_level"]) == ("trace_export_failed", "warning")
    assert "400" in event["message"]
    assert logging.getLogger("opentelemetry").propagate is False
