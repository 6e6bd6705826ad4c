from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.worker.membership import MAX_PENDING_STEPS
from services.worker.model.synthetic import synthetic_token
from shared.codec.joining import join_request_to_pb
from shared.messages import Joined, Loading, SamplingParams
from tests.fakes.fake_worker_peers import (
    FakeRegistry,
    RankClient,
    join_request,
    plan,
    running_worker,
    sequence,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def worker() -> AsyncIterator[RankClient]:
    async with (
        FakeRegistry().serving() as registry,
        running_worker(registry) as claim,
        RankClient.connected(claim.address) as client,
    ):
        yield client


async def health(client: RankClient) -> int:
    answer = await health_pb2_grpc.HealthStub(client.channel).Check(
        health_pb2.HealthCheckRequest(service="orca.v1.Worker")
    )
    return int(answer.status)


def first_plan(num_prompt_tokens: int = 20, *, epoch: int = 1) -> object:
    return plan(
        0,
        (0, 0, num_prompt_tokens),
        epoch=epoch,
        new_sequences=[sequence(0, range(num_prompt_tokens))],
        num_new_blocks=[2],
        new_block_ids=[3, 5],
    )


async def failure_of(call: aio.StreamUnaryCall | aio.UnaryStreamCall) -> tuple[grpc.StatusCode, str]:  # type: ignore[type-arg]
    code, details = await call.code(), await call.details()
    return code, details or ""


async def test_claims_rank_with_addresses_of_its_own() -> None:
    async with FakeRegistry().serving() as registry, running_worker(registry) as claim:
        assert (claim.stage, claim.tp_rank, claim.device) == (0, 0, "cpu")
        assert claim.address.startswith("127.0.0.1:")
        assert claim.rendezvous_address.startswith("127.0.0.1:")
        assert claim.address != claim.rendezvous_address


async def test_join_reports_progress_then_capacity(worker: RankClient) -> None:
    assert await health(worker) == NOT_SERVING
    *progress, joined = await worker.join(join_request("synthetic:num_layers=4", block_size=16))
    assert [step.phase for step in progress if isinstance(step, Loading)] == ["weights", "kv_cache", "warm_up"]
    block_bytes = 4 * 1536 * 16
    assert joined == Joined((4 << 20) // block_bytes, 8192, 260, "float32", 0, block_bytes)
    assert await health(worker) == SERVING


async def test_prefill_and_decodes(worker: RankClient) -> None:
    await worker.join(join_request())
    control, results = worker.execute(), worker.results()
    await control.send(first_plan())  # type: ignore[arg-type]
    first = await results.next()
    assert (first.epoch, first.step_id, first.token_ids, first.invalid) == (1, 0, [synthetic_token(20)], [])
    for step_id in range(1, 8):
        position = 19 + step_id
        previous = synthetic_token(position)
        await control.send(plan(step_id, (0, position, 1), num_appended_tokens=[1], appended_token_ids=[previous]))
        assert (await results.next()).token_ids == [synthetic_token(position + 1)]
    assert await control.finish() == 8
    timings = await worker.timeline()
    assert [timing.step_id for timing in timings] == list(range(8))
    assert [timing.num_tokens for timing in timings] == [20] + [1] * 7
    for timing in timings:
        assert timing.received_ns <= timing.started_ns <= timing.ended_ns


async def test_chunks_mixed_batch_release_and_reuse(worker: RankClient) -> None:
    await worker.join(join_request())
    control, results = worker.execute(), worker.results()
    greedy, random = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9, seed=7)
    await control.send(
        plan(
            0,
            (0, 0, 4),
            (1, 0, 3),
            samples=[False, True],
            new_sequences=[sequence(0, range(10), greedy), sequence(1, range(3), random)],
            num_new_blocks=[1, 1],
            new_block_ids=[0, 1],
        ),
        plan(1, (0, 4, 6), (1, 3, 1), num_appended_tokens=[0, 1], appended_token_ids=[synthetic_token(3)]),
        plan(2, released_rows=[0]),
        plan(
            3,
            (0, 0, 2),
            new_sequences=[sequence(0, range(2))],
            num_new_blocks=[1],
            new_block_ids=[2],
            released_rows=[1],
        ),
    )
    tokens = [(await results.next()).token_ids for _ in range(4)]
    assert tokens == [[synthetic_token(3)], [synthetic_token(10), synthetic_token(4)], [], [synthetic_token(2)]]


async def test_weights_are_kept_and_old_epoch_ends_when_joining_again(worker: RankClient) -> None:
    await worker.join(join_request())
    control, results = worker.execute(), worker.results()
    await control.send(first_plan())  # type: ignore[arg-type]
    await results.next()
    progress = await worker.join(join_request(epoch=2))
    assert [step.phase for step in progress if isinstance(step, Loading)] == ["kv_cache", "warm_up"]
    for call in (control.call, results.call):
        code, details = await failure_of(call)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "epoch 2 takes the place" in details
    control, results = worker.execute(), worker.results(epoch=2)
    await control.send(first_plan(epoch=2))  # type: ignore[arg-type]
    assert (await results.next()).epoch == 2


async def test_step_gap_is_fatal(worker: RankClient) -> None:
    await worker.join(join_request())
    control, results = worker.execute(), worker.results()
    await control.send(first_plan())  # type: ignore[arg-type]
    await results.next()
    await control.send(plan(2, (0, 20, 1)))
    code, details = await failure_of(control.call)
    assert code is grpc.StatusCode.ABORTED
    assert "step 2 came where step 1 was due" in details
    assert (await failure_of(results.call))[0] is grpc.StatusCode.ABORTED
    assert await health(worker) == NOT_SERVING
    again = worker.execute()
    code, details = await failure_of(again.call)
    assert code is grpc.StatusCode.ABORTED
    assert "epoch 1 is over" in details


async def test_stale_epoch_is_refused_and_does_no_harm(worker: RankClient) -> None:
    await worker.join(join_request(epoch=2))
    stale = worker.execute()
    await stale.send(first_plan(epoch=1))  # type: ignore[arg-type]
    code, details = await failure_of(stale.call)
    assert code is grpc.StatusCode.ABORTED
    assert "is of epoch 1" in details
    assert (await failure_of(worker.results(epoch=1).call))[0] is grpc.StatusCode.ABORTED
    control, results = worker.execute(), worker.results(epoch=2)
    await control.send(first_plan(epoch=2))  # type: ignore[arg-type]
    assert (await results.next()).token_ids == [synthetic_token(20)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (plan(0, (4, 0, 1)), "row 4, which holds no sequence"),
        (plan(0, (0, 0, 1), new_sequences=[sequence(0, [260])]), "token id 260"),
        (plan(0, (0, 0, 1), new_sequences=[sequence(0, [1])]), "its 0 blocks hold 0"),
        (
            plan(0, (0, 0, 1), new_sequences=[sequence(0, [1])], num_new_blocks=[1], new_block_ids=[1 << 20]),
            "block 1048576",
        ),
    ],
)
async def test_plan_that_does_not_fit_fails_both_streams(worker: RankClient, bad: object, message: str) -> None:
    await worker.join(join_request())
    control, results = worker.execute(), worker.results()
    await control.send(bad)  # type: ignore[arg-type]
    for call in (control.call, results.call):
        code, details = await failure_of(call)
        assert code is grpc.StatusCode.ABORTED
        assert message in details


async def test_second_control_stream_is_refused(worker: RankClient) -> None:
    await worker.join(join_request())
    control, results = worker.execute(), worker.results()
    await control.send(first_plan())  # type: ignore[arg-type]
    await results.next()
    second = worker.execute()
    code, details = await failure_of(second.call)
    assert code is grpc.StatusCode.ABORTED
    assert "a control stream is open already" in details
    assert (await failure_of(worker.results().call))[0] is grpc.StatusCode.ABORTED
    await control.send(plan(1, (0, 20, 1), num_appended_tokens=[1], appended_token_ids=[synthetic_token(20)]))
    assert (await results.next()).token_ids == [synthetic_token(21)]


async def test_broken_control_stream_ends_the_epoch(worker: RankClient) -> None:
    # Many times: where the handler is when the cancellation reaches it is a matter of luck.
    for epoch in range(1, 60):
        await worker.join(join_request(epoch=epoch))
        control, results = worker.execute(), worker.results(epoch)
        await control.send(first_plan(epoch=epoch))  # type: ignore[arg-type]
        await results.next()
        control.call.cancel()
        code, details = await failure_of(results.call)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "closed by its sender" in details


async def test_nothing_works_before_joining(worker: RankClient) -> None:
    for call in (worker.execute().call, worker.results().call):
        code, details = await failure_of(call)
        assert code is grpc.StatusCode.ABORTED
        assert "must join" in details
    assert await worker.timeline() == []


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"model": "no-such-model"}, grpc.StatusCode.NOT_FOUND, "no-such-model"),
        ({"dtype": "int3"}, grpc.StatusCode.INVALID_ARGUMENT, "--dtype"),
        ({"kv_memory_bytes": 10}, grpc.StatusCode.INVALID_ARGUMENT, "budget"),
        ({"max_model_len": 1 << 20}, grpc.StatusCode.INVALID_ARGUMENT, "--max-model-len"),
        ({"stage": 1, "num_stages": 2}, grpc.StatusCode.ABORTED, "asked to join as stage 1"),
        ({"num_stages": 13}, grpc.StatusCode.INVALID_ARGUMENT, "13 stages for 12 layers"),
    ],
)
async def test_join_refuses_with_a_reason(
    worker: RankClient, fields: dict[str, object], code: grpc.StatusCode, message: str
) -> None:
    with pytest.raises(aio.AioRpcError) as failure:
        await worker.join(join_request(**fields))  # type: ignore[arg-type]
    assert failure.value.code() is code
    assert message in (failure.value.details() or "")
    assert isinstance((await worker.join(join_request()))[-1], Joined)


async def test_cancelled_join_leaves_the_worker_able_to_join(worker: RankClient) -> None:
    async with FakeRegistry().serving() as registry, running_worker(registry) as store_owner:
        lonely = join_request(num_stages=2, rendezvous_address=store_owner.rendezvous_address)
        waiting = worker.stub.Join(join_request_to_pb(lonely))
        async for message in waiting:
            if message.loading.phase == "process_group":
                break
        waiting.cancel()
        joined = (await worker.join(join_request(epoch=2)))[-1]
        assert isinstance(joined, Joined)


async def test_later_join_takes_the_place_of_one_that_waits(worker: RankClient) -> None:
    async with FakeRegistry().serving() as registry, running_worker(registry) as store_owner:
        lonely = join_request(num_stages=2, rendezvous_address=store_owner.rendezvous_address)
        waiting = worker.stub.Join(join_request_to_pb(lonely))
        async for message in waiting:
            if message.loading.phase == "process_group":
                break
        assert isinstance((await worker.join(join_request(epoch=2)))[-1], Joined)
        code, details = await failure_of(waiting)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "joining epoch 1 was given up" in details


async def test_join_cancelled_while_loading_and_joined_anew(worker: RankClient) -> None:
    loading = worker.stub.Join(join_request_to_pb(join_request("random:tiny-llama-30l")))
    async for message in loading:
        if message.loading.done:
            break
    loading.cancel()
    assert isinstance((await worker.join(join_request("random:tiny-llama", epoch=2)))[-1], Joined)


async def test_leaving_while_waiting_for_other_ranks() -> None:
    async with FakeRegistry().serving() as registry:
        async with running_worker(registry) as claim, RankClient.connected(claim.address) as client:
            lonely = join_request(num_stages=2, rendezvous_address=claim.rendezvous_address)
            waiting = client.stub.Join(join_request_to_pb(lonely))
            async for message in waiting:
                if message.loading.phase == "process_group":
                    break
        assert await waiting.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


async def test_leaving_ends_the_control_stream_and_says_why() -> None:
    async with (
        FakeRegistry().serving() as registry,
        running_worker(registry) as claim,
        RankClient.connected(claim.address) as client,
    ):
        await client.join(join_request("synthetic:step_ms=5"))
        control, results = client.execute(), client.results()
        await control.send(first_plan())  # type: ignore[arg-type]
        await results.next()
        await control.send(*(plan(step_id) for step_id in range(1, 4)))
        registry.leave.set()
        code, details = await failure_of(control.call)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "leaving" in details


async def test_the_end_of_the_control_stream_is_the_end_of_the_epoch(worker: RankClient) -> None:
    await worker.join(join_request())
    results = worker.results()
    control = worker.execute()
    await control.send(first_plan())  # type: ignore[arg-type]
    assert await control.finish() == 1
    assert (await results.next()).step_id == 0
    code, details = await failure_of(results.call)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "closed by its sender" in details


async def test_results_that_nobody_takes_hold_the_control_stream_back(worker: RankClient) -> None:
    await worker.join(join_request())
    control = worker.execute()
    num_steps = MAX_PENDING_STEPS + 50
    await control.send(*(plan(step_id) for step_id in range(num_steps)))
    assert not control.call.done()
    results = worker.results()
    assert [(await results.next()).step_id for _ in range(num_steps)] == list(range(num_steps))
    assert len(await worker.timeline()) == num_steps
    assert await control.finish() == num_steps


async def test_random_model_decodes_like_one_prefill(worker: RankClient) -> None:
    """Prefill then decodes give the greedy tokens that prefilling everything gives."""
    await worker.join(join_request("random:tiny-llama"))
    control, results = worker.execute(), worker.results()
    prompt, output = list(range(40, 59)), list[int]()
    await control.send(
        plan(0, (0, 0, 19), new_sequences=[sequence(0, prompt)], num_new_blocks=[2], new_block_ids=[7, 2])
    )
    output += (await results.next()).token_ids
    for step_id in range(1, 6):
        await control.send(plan(step_id, (0, 18 + step_id, 1), num_appended_tokens=[1], appended_token_ids=output[-1:]))
        output += (await results.next()).token_ids
    whole = prompt + output
    for cut in range(1, 6):
        await control.send(
            plan(
                5 + cut,
                (cut, 0, 19 + cut),
                new_sequences=[sequence(cut, whole[: 19 + cut])],
                num_new_blocks=[2],
                new_block_ids=[10 + 2 * cut, 11 + 2 * cut],
            )
        )
        assert (await results.next()).token_ids == [output[cut]]
