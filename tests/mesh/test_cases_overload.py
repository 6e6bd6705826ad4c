"""Scenarios 33 and 35: more than there is room for, at once or ever. R7: what is too large is told so."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2

from services.mesh import MeshOptions
from shared.client import GenerateOptions
from shared.codec.calls import generate_call
from shared.config import EngineConfig, SchedulingConfig
from shared.errors import InvalidRequestError, OverloadedError
from shared.pb import gateway_pb2_grpc
from shared.rpc import connect
from tests.mesh.live_mesh import LiveMesh, live_mesh

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

NUM_BLOCKS, BLOCK_SIZE = 20, 16
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE
SENTENCE = b"the quick brown fox jumps over the lazy dog "


def expected(num_prompt: int, max_tokens: int) -> list[int]:
    return [SENTENCE[position % len(SENTENCE)] for position in range(num_prompt, num_prompt + max_tokens)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def live() -> AsyncIterator[LiveMesh]:
    engine = EngineConfig(
        model="synthetic:step_ms=1,num_layers=1",
        scheduling=SchedulingConfig(max_batch_size=8, prefix_cache=False),
        block_size=BLOCK_SIZE,
        kv_memory_bytes=NUM_BLOCKS * BLOCK_SIZE * 1536,
        max_model_len=1024,
    )
    async with live_mesh(MeshOptions(engine, max_requests=8, max_queued=16, grace_s=1)) as running:
        assert (await running.engine()).info is not None
        yield running


class Burst:
    """Requests over both fronts; each tells how many choices it got, or when it may come again."""

    def __init__(self, live: LiveMesh) -> None:
        self.num_choices = [4 if at % 10 == 0 else 1 for at in range(200)]
        fronts = (self._http, self._grpc)
        self.tasks = [
            asyncio.create_task(fronts[at % 2](live, num_choices, stream=at % 4 == 0))
            for at, num_choices in enumerate(self.num_choices)
        ]

    @staticmethod
    async def _http(live: LiveMesh, num_choices: int, *, stream: bool) -> int | float:
        body = {"prompt": "x", "n": num_choices, "max_tokens": 5, "ignore_eos": True, "stream": stream}
        answer = await live.http.post("/v1/completions", json=body)
        if answer.status_code == 429:
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
            return float(answer.headers["retry-after"])
        assert answer.status_code == 200, answer.text
        assert answer.text.count('"finish_reason":"length"') == num_choices
        return num_choices

    @staticmethod
    async def _grpc(live: LiveMesh, num_choices: int, *, stream: bool) -> int | float:
        del stream
        options = GenerateOptions(n=num_choices, max_tokens=5, ignore_eos=True)
        try:
            deltas = [delta async for delta in live.client.generate("x", options)]
        except OverloadedError as refusal:
            return refusal.retry_after_s or 0
        return sum(delta.finish is not None for delta in deltas)


async def retry_info_s(live: LiveMesh) -> float:
    """What any gRPC client learns from the standard's own error details."""
    async with connect(live.mesh.gateway_address) as channel:
        call = gateway_pb2_grpc.GatewayStub(channel).Generate(generate_call("x", GenerateOptions(n=8), None))
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        packed = dict(await call.trailing_metadata())["grpc-status-details-bin"]
    for detail in status_pb2.Status.FromString(packed).details:
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(retry):
            return float(retry.retry_delay.ToTimedelta().total_seconds())
    pytest.fail("no RetryInfo")


async def test_the_surplus_of_a_burst_is_refused_at_once_and_the_rest_ends_well(live: LiveMesh) -> None:
    # While the worker does nothing nobody ends, so what is accepted is what there is room for.
    async with live.stopped("stage 0.0"):
        burst = Burst(live)
        async with asyncio.timeout(30):
            while sum(task.done() for task in burst.tasks) + (await live.client.status()).num_gateway_requests != 200:
                pass
        assert await retry_info_s(live) >= 1
        refused = [task for task in burst.tasks if task.done()]
        for task in refused:
            assert task.result() >= 1, "seconds after which to come again"
    accepted = [at for at, task in enumerate(burst.tasks) if task not in refused]
    assert 8 + 16 - 3 <= sum(burst.num_choices[at] for at in accepted) <= 8 + 16, "n takes n places"
    for at in accepted:
        assert await burst.tasks[at] == burst.num_choices[at]
    await live.idle()


async def test_what_is_too_large_is_not_taken_for_overload(live: LiveMesh) -> None:
    for prompt in ("x" * 5_000_000, [65] * 1_000_000):
        answer = await live.http.post("/v1/completions", json={"prompt": prompt})
        assert answer.status_code == 400, answer.text[:200]
        assert answer.json()["error"]["param"] == "prompt"
        with pytest.raises(InvalidRequestError):
            await live.generate(prompt)
    answer = await live.http.post("/v1/completions", json={"prompt": "x" * 9_000_000})
    assert answer.status_code == 413
    assert "max-body-bytes" in answer.json()["error"]["message"]
    with pytest.raises(InvalidRequestError, match="too large"):
        await live.generate("x" * 70_000_000)
    too_many = await live.http.post("/v1/completions", json={"prompt": ["x"] * 300})
    assert too_many.status_code == 400
    assert "at most 128" in too_many.json()["error"]["message"]
    assert len(await live.generate("x", max_tokens=3)) == 3


async def test_large_answers_arrive(live: LiveMesh) -> None:
    """20 alternatives for each of hundreds of tokens, of several choices, in one answer."""
    body = {"messages": [{"role": "user", "content": "x"}], "n": 8, "max_tokens": 250, "ignore_eos": True}
    answer = await live.http.post("/v1/chat/completions", json={**body, "logprobs": True, "top_logprobs": 20})
    assert answer.status_code == 200, answer.text[:200]
    for choice in answer.json()["choices"]:
        assert [len(token["top_logprobs"]) for token in choice["logprobs"]["content"]] == [20] * 250


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(400, 1), (200, 400), (NUM_SLOTS, 1), (1, NUM_SLOTS)])
async def test_what_can_never_fit_is_refused_at_once(live: LiveMesh, num_prompt: int, max_tokens: int) -> None:
    body = {"prompt": [65] * num_prompt, "max_tokens": max_tokens}
    answer = await live.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert f"capacity of {NUM_SLOTS} K/V slots" in answer.json()["error"]["message"]
    with pytest.raises(InvalidRequestError, match=f"capacity of {NUM_SLOTS} K/V slots"):
        await live.generate([65] * num_prompt, max_tokens=max_tokens)


async def test_what_fits_by_itself_ends_well_however_many_there_are(live: LiveMesh) -> None:
    """Two that together outgrow the pool, eight choices of one prompt, and one that takes all of it."""
    before = (await live.engine()).num_preemptions
    for lengths in ((169, 170), (130, 131)):
        both = await asyncio.gather(*(live.generate([65] * num, max_tokens=150) for num in lengths))
        assert both == [expected(num, 150) for num in lengths]
    assert (await live.engine()).num_preemptions > before
    eight = await live.generate([65] * 100, max_tokens=100, n=8)
    assert sorted(eight) == sorted(8 * expected(100, 100))
    assert await live.generate([65] * (NUM_SLOTS - 10), max_tokens=10) == expected(NUM_SLOTS - 10, 10)
    await live.idle()


async def test_a_context_larger_than_the_pool_is_told_at_the_start(live: LiveMesh) -> None:
    (warning,) = [line for line in live.lines if line.event == "context_exceeds_kv"]
    assert warning.fields["num_slots"] == NUM_SLOTS
    assert warning.fields["max_model_len"] == 1024
    assert "--kv-memory" in str(warning.fields["advice"])
