"""What the switches beyond ORCA promise, measured as the benchmark does, on an executor of known step time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.beyond_orca import DEFAULT, chunked_prefill, prefix_cache, run_ahead, split_over_stages

pytestmark = pytest.mark.slow


async def test_a_long_prompt_does_not_stall_running_requests() -> None:
    model = "synthetic:step_ms=2,token_us=100"
    chunked = await chunked_prefill(model, DEFAULT)
    whole = await chunked_prefill(model, replace(DEFAULT, chunked_prefill=False))
    assert chunked["interval_ms_p99"] <= 2 * chunked["compute_of_a_full_iteration_ms"]
    assert whole["interval_ms_p99"] >= 3 * chunked["interval_ms_p99"]


async def test_a_shared_prefix_brings_the_first_token_five_times_sooner() -> None:
    times = await prefix_cache("synthetic:token_us=1000", DEFAULT)
    assert times["first_request_ms"] >= 5 * times["second_request_ms"]


async def test_running_ahead_closes_the_gap_between_iterations() -> None:
    model = "synthetic:step_ms=5"
    waiting = await run_ahead(model, replace(DEFAULT, run_ahead=0))
    ahead = await run_ahead(model, replace(DEFAULT, run_ahead=1))
    assert ahead["gap_ms_p50"] < 0.5 * waiting["gap_ms_p50"]
    assert ahead["output_tokens_s"] > waiting["output_tokens_s"]


async def test_few_requests_keep_two_stages_busy() -> None:
    model = "synthetic:token_us=5000"
    split = await split_over_stages(model, DEFAULT)
    unsplit = await split_over_stages(model, replace(DEFAULT, split_over_stages=False))
    assert split["output_tokens_s"] >= 1.7 * unsplit["output_tokens_s"]
