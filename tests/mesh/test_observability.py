"""A whole mesh of real processes under watch: one trace for a request over all of them, metrics of each that add up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from services.mesh import LocalMesh, MeshOptions
from shared.config import EngineConfig, ListenConfig, ObservabilityConfig
from shared.pb import gateway_pb2, gateway_pb2_grpc
from shared.rpc import connect
from shared.topology import Topology
from shared.tracing import TraceContext
from tests.exposition import Exposition, faults, scrape
from tests.fakes.otlp_collector import OtlpCollector

if TYPE_CHECKING:
    from services.mesh import LogLine
    from tests.fakes.otlp_collector import CollectedSpan

pytestmark = pytest.mark.slow

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NUM_PROMPT_TOKENS = 40
NUM_OUTPUT_TOKENS = 6
CLOCKS_DIFFER_NS = 5_000_000
"""Each process reads the wall clock by itself."""


async def generate(address: str, traceparent: str | None) -> None:
    request = gateway_pb2.GenerateRequest(
        prompts=[gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=range(NUM_PROMPT_TOKENS)))],
        options=gateway_pb2.GenerationOptions(max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True),
    )
    async with connect(address) as channel:
        metadata = [("traceparent", traceparent)] if traceparent else []
        async for _ in gateway_pb2_grpc.GatewayStub(channel).Generate(request, metadata=metadata):
            pass


async def test_one_trace_and_metrics_of_every_process() -> None:
    urls: dict[str, str] = {}

    def take(line: LogLine) -> None:
        if line.event == "metrics_listening":
            urls[line.service] = str(line.fields["url"])

    with OtlpCollector() as collector:
        options = MeshOptions(
            engine=EngineConfig(model="synthetic:step_ms=1", topology=Topology(num_stages=2, tp_size=1)),
            device="cpu",
            num_threads=1,
            observability=ObservabilityConfig(ListenConfig(port=0), collector.endpoint),
        )
        async with LocalMesh(options, take) as mesh:
            await generate(mesh.gateway_address, CLIENT)
            await generate(mesh.gateway_address, None)
            assert set(urls) == {"gateway", "scheduler", "stage 0.0", "stage 1.0"}
            check_metrics({name: await scrape(url) for name, url in urls.items()})
    check_traces(collector.spans)


def check_metrics(found: dict[str, Exposition]) -> None:
    for exposition in found.values():
        assert not faults(exposition)
    gateway, scheduler = found["gateway"], found["scheduler"]
    assert gateway.value("orca_requests_received_total", method="Generate") == 2
    assert gateway.value("orca_requests_ended_total", reason="length", code="OK") == 2
    assert gateway.value("orca_requests_in_flight") == 0
    assert gateway.value("orca_request_generation_tokens_sum") == 2 * NUM_OUTPUT_TOKENS
    assert scheduler.value("orca_sequences_submitted_total") == 2
    assert scheduler.value("orca_sequences_ended_total", reason="length", code="OK") == 2
    assert scheduler.value("orca_generation_tokens_total") == 2 * NUM_OUTPUT_TOKENS
    assert scheduler.value("orca_prompt_tokens_total") == 2 * NUM_PROMPT_TOKENS
    assert scheduler.value("orca_prefix_cache_hits_total") > 0, "the second prompt is that of the first"
    num_iterations = scheduler.value("orca_iteration_duration_seconds_count")
    num_tokens = scheduler.value("orca_iteration_tokens_sum")
    for stage in ("0", "1"):
        worker = found[f"stage {stage}.0"]
        assert worker.value("orca_worker_steps_computed_total", stage=stage, tp_rank="0") == num_iterations
        assert worker.value("orca_worker_step_tokens_sum", stage=stage, tp_rank="0") == num_tokens


def check_traces(spans: list[CollectedSpan]) -> None:
    client = TraceContext.parse(CLIENT)
    assert client is not None
    traces = {span.trace_id for span in spans}
    assert len(traces) == 2
    assert f"{client.trace_id:032x}" in traces
    for trace_id in traces:
        tree = {span.name: span for span in spans if span.trace_id == trace_id}
        assert set(tree) == {"text_completion", "queue", "prefill", "decode", "stage 0", "stage 1"}
        assert len([span for span in spans if span.trace_id == trace_id]) == len(tree), "one span each"
        root = tree.pop("text_completion")
        assert root.service == "orca-gateway"
        assert root.parent_id == (f"{client.span_id:016x}" if int(trace_id, 16) == client.trace_id else "")
        for span in tree.values():
            assert span.parent_id == root.span_id
            assert span.service == ("orca-worker" if span.name.startswith("stage") else "orca-scheduler")
            assert span.attributes["orca.request_id"] == root.attributes["orca.request_id"]
            assert root.start_ns - CLOCKS_DIFFER_NS <= span.start_ns <= span.end_ns <= root.end_ns + CLOCKS_DIFFER_NS
        assert tree["queue"].end_ns <= tree["prefill"].start_ns + CLOCKS_DIFFER_NS
        assert tree["prefill"].end_ns <= tree["decode"].start_ns + CLOCKS_DIFFER_NS
        num_steps = {tree[name].attributes["orca.num_steps"] for name in ("stage 0", "stage 1")}
        assert len(num_steps) == 1
        assert num_steps.pop() >= NUM_OUTPUT_TOKENS
        assert tree["decode"].attributes["orca.num_output_tokens"] == NUM_OUTPUT_TOKENS
