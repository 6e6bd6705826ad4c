"""Workers in processes of their own: stages overlap, ranks agree, and what breaks is named."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc
import psutil
import pytest

from services.worker.model.synthetic import synthetic_token
from tests.fakes.fake_worker_peers import (
    FakeRegistry,
    RankClient,
    SpawnedWorker,
    join_all,
    join_request,
    plan,
    running_worker,
    sequence,
    spawned_worker,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.fakes.fake_worker_peers import Control, Results

STEP_NS = 20_000_000


@pytest.fixture
async def registry() -> AsyncIterator[FakeRegistry]:
    async with FakeRegistry().serving() as serving:
        yield serving


@contextlib.asynccontextmanager
async def workers(registry: FakeRegistry, *ranks: tuple[int, int]) -> AsyncIterator[list[SpawnedWorker]]:
    """Start all at once; claims are told apart by rank."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(spawned_worker(registry, *rank)) for rank in ranks]


async def greedy(control: Control, results: Results, prompt: list[int], num_tokens: int) -> list[int]:
    """Run one sequence by itself, from step 0."""
    output: list[int] = []
    for step_id in range(num_tokens):
        if step_id == 0:
            await control.send(
                plan(
                    0,
                    (0, 0, len(prompt)),
                    new_sequences=[sequence(0, prompt)],
                    num_new_blocks=[4],
                    new_block_ids=[9, 4, 1, 6],
                )
            )
        else:
            position = len(prompt) + step_id - 1
            await control.send(plan(step_id, (0, position, 1), num_appended_tokens=[1], appended_token_ids=output[-1:]))
        output += (await results.next()).token_ids
    return output


async def test_stages_overlap_and_control_runs_ahead_of_compute(registry: FakeRegistry) -> None:
    async with workers(registry, (0, 0), (1, 0)) as (first, last):
        await join_all("synthetic:step_ms=20", first, last)
        control, results = first.client.execute(), last.client.results()
        prompts = [list(range(5)), list(range(9))]
        lengths = [len(prompt) for prompt in prompts]
        for row, prompt in enumerate(prompts):
            await control.send(
                plan(
                    row,
                    (row, 0, len(prompt)),
                    new_sequences=[sequence(row, prompt)],
                    num_new_blocks=[2],
                    new_block_ids=[2 * row, 2 * row + 1],
                )
            )
        for step_id in range(2, 14):
            row = step_id % 2
            result = await results.next()
            assert result.step_id == step_id - 2
            assert result.token_ids == [synthetic_token(lengths[row])]
            await control.send(
                plan(step_id, (row, lengths[row], 1), num_appended_tokens=[1], appended_token_ids=result.token_ids)
            )
            lengths[row] += 1
        assert await control.finish() == 14
        early, late = await first.client.timeline(), await last.client.timeline()
    assert len(early) == len(late) == 14
    for before, after in zip(early, late, strict=True):
        assert after.received_ns < before.ended_ns, "the control message must not wait for the compute"
        assert after.started_ns >= before.ended_ns
        assert after.ended_ns - after.started_ns >= STEP_NS
    overlaps = [
        min(late[step].ended_ns, early[step + 1].ended_ns) - max(late[step].started_ns, early[step + 1].started_ns)
        for step in range(13)
    ]
    assert sum(overlap > STEP_NS // 2 for overlap in overlaps) >= 10, overlaps


@pytest.mark.parametrize("ranks", [((0, 0), (1, 0)), ((0, 0), (0, 1))], ids=["two_stages", "two_ranks"])
async def test_split_model_says_what_the_whole_one_says(
    registry: FakeRegistry, ranks: tuple[tuple[int, int], ...]
) -> None:
    prompt = list(range(60, 90))
    async with running_worker(registry) as claim, RankClient.connected(claim.address) as whole:
        await whole.join(join_request("random:tiny-llama"))
        expected = await greedy(whole.execute(), whole.results(), prompt, 8)
    async with workers(registry, *ranks) as split:
        await join_all("random:tiny-llama", *split)
        leaders = [worker for worker in split if worker.claim.tp_rank == 0]
        control, results = leaders[0].client.execute(), leaders[-1].client.results()
        assert await greedy(control, results, prompt, 8) == expected
        assert await control.finish() == 8
        for worker in split:
            assert [timing.num_tokens for timing in await worker.client.timeline()] == [30] + [1] * 7
            listening = [
                connection.laddr.ip.removeprefix("::ffff:")  # IPv4 on a socket that speaks both
                for connection in psutil.Process(worker.process.pid).net_connections()
                if connection.status == psutil.CONN_LISTEN
            ]
            assert set(listening) == {"127.0.0.1"}, "no socket may listen on other interfaces"


async def test_killed_stage_is_named_and_survivor_joins_again(registry: FakeRegistry) -> None:
    async with workers(registry, (0, 0)) as (first,):
        async with workers(registry, (1, 0)) as (last,):
            await join_all("synthetic:", first, last)
            control, results = first.client.execute(), last.client.results()
            assert await greedy(control, results, [1, 2, 3], 3) == [synthetic_token(3 + step) for step in range(3)]
            last.process.kill()
            assert await control.call.code() is grpc.StatusCode.UNAVAILABLE
            assert f"stage 1 at {last.claim.address}" in (await control.call.details() or "")
        async with workers(registry, (1, 0)) as (last,):
            await join_all("synthetic:", first, last, epoch=2)
            control, results = first.client.execute(), last.client.results(epoch=2)
            await control.send(
                plan(
                    0,
                    (0, 0, 3),
                    epoch=2,
                    new_sequences=[sequence(0, [1, 2, 3])],
                    num_new_blocks=[1],
                    new_block_ids=[0],
                )
            )
            assert (await results.next()).token_ids == [synthetic_token(3)]


async def test_failing_compute_of_a_later_stage_reaches_the_scheduler(registry: FakeRegistry) -> None:
    """A plan that only the last stage cannot run: stage 1 has fewer blocks, since it holds more K/V per token."""
    async with workers(registry, (0, 0), (1, 0)) as (first, last):
        await asyncio.gather(
            *(
                worker.client.join(
                    join_request(
                        stage=stage,
                        num_stages=2,
                        rendezvous_address=first.claim.rendezvous_address,
                        next_stage_address="" if stage else last.claim.address,
                        kv_memory_bytes=1 << (20 if stage else 24),
                    )
                )
                for stage, worker in enumerate((first, last))
            )
        )
        control, results = first.client.execute(), last.client.results()
        await control.send(
            plan(0, (0, 0, 1), new_sequences=[sequence(0, [1])], num_new_blocks=[1], new_block_ids=[100])
        )
        assert await control.call.code() is grpc.StatusCode.UNAVAILABLE
        assert "stage 1 at" in (await control.call.details() or "")
        assert "names block 100" in (await control.call.details() or "")
        assert await results.call.code() is grpc.StatusCode.ABORTED
