"""`orca bench serve` as a process against a whole mesh, over both of its fronts."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from bench.load.traces import TraceConfig, TraceName, make_trace
from services.mesh import MeshOptions
from shared.config import EngineConfig
from tests.mesh.live_mesh import live_mesh

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

KEY = "a-key-of-16-characters-at-least"
NUM_REQUESTS = 12


async def bench(*options: str) -> tuple[int | None, dict[str, Any], str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "bench", "serve", "--json", "-n", str(NUM_REQUESTS), *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 90)
    return process.returncode, json.loads(out or b"{}"), err.decode()


async def test_both_fronts_answer_the_whole_trace_of_orca() -> None:
    async with live_mesh(MeshOptions(engine=EngineConfig(model="random:tiny-llama"))) as live:
        engine = (await live.client.model_info()).engine
        reports = {}
        for front, url in (("http", live.mesh.http_address), ("grpc", f"grpc://{live.mesh.gateway_address}")):
            exit_code, reports[front], err = await bench("-u", url, "-c", "4", "--seed", "9", "--goodput", "e2e:60000")
            assert (exit_code, err) == (0, "")
        await live.idle()
        num_ended = await live.num_ended("length")
    trace = make_trace(TraceConfig.of(TraceName.ORCA, num_requests=NUM_REQUESTS, seed=9), vocab_size=engine.vocab_size)
    for report in reports.values():
        assert report["endpoint"]["model"] == engine.model
        assert report["trace"]["vocab_size"] == engine.vocab_size
        (run,) = report["runs"]
        assert (run["num_ok"], run["num_failed"], run["num_short"]) == (NUM_REQUESTS, 0, 0)
        assert run["num_prompt_tokens"] == sum(len(request.prompt) for request in trace)
        assert run["num_output_tokens"] == sum(request.max_tokens for request in trace)
        assert run["goodput_ratio"] == 1
        assert 0 < run["ttft"]["p50_ms"] <= run["e2e"]["p50_ms"]
        assert run["output_tokens_per_s"] == pytest.approx(run["num_output_tokens"] / run["duration_s"])
    assert num_ended == 2 * (NUM_REQUESTS + 1), "each run and its warm-up, at the gateway as well"


async def test_an_open_loop_of_conversations_with_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"bench {KEY}\n")
    options = MeshOptions(engine=EngineConfig(model="synthetic:step_ms=1"), api_keys=str(keys))
    async with live_mesh(options) as live:
        url = live.mesh.http_address
        exit_code, _, err = await bench("-u", url)
        assert exit_code == 1
        assert "HTTP 401" in err
        exit_code, report, err = await bench(
            *("-u", url, "--api-key", KEY, "--api", "chat", "--request-rate", "40,80", "--trace", "shared-prefix")
        )
    assert (exit_code, err) == (0, "")
    assert [(run["request_rate"], run["num_ok"]) for run in report["runs"]] == [(40, NUM_REQUESTS), (80, NUM_REQUESTS)]
