"""The scheduler over real gRPC: fake workers on one side, the test as a gateway on the other."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.scheduler.app import run_scheduler
from services.scheduler.core.core import SchedulerCore
from shared.config import EngineConfig, ListenConfig, SchedulerConfig
from shared.errors import ConfigError, ModelError
from shared.ids import Handle, StepId
from shared.lifecycle import Shutdown
from shared.messages import Cancel, FinishReason, Hello, PromptLogprobs, StepResult, TokenLogprobs
from shared.pb import worker_pb2, worker_pb2_grpc
from shared.rpc import connect
from shared.status import StatusCode
from tests.factories import ORCA, make_submit
from tests.fakes.scripted_workers import ScriptedWorker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    StartScheduler = Callable[..., contextlib.AbstractAsyncContextManager["SchedulerUnderTest"]]
    from tests.service.scheduler.conftest import SchedulerUnderTest


@contextlib.asynccontextmanager
async def worker_of(scheduler: SchedulerUnderTest, **options: object) -> AsyncIterator[ScriptedWorker]:
    worker = ScriptedWorker(**options)  # type: ignore[arg-type]
    await worker.start()
    try:
        async with worker.registered(scheduler.address):
            yield worker
    finally:
        await worker.kill()


async def test_ready_only_once_every_rank_has_joined(start_scheduler: StartScheduler) -> None:
    async with start_scheduler(num_stages=2) as scheduler, connect(scheduler.address) as channel:
        watch = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
        assert (await anext(watch)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        status = await scheduler.status()
        assert not status.ready
        assert status.reason == "waiting for workers: stage 0 rank 0, stage 1 rank 0"
        async with worker_of(scheduler, stage=0), scheduler.session() as session:
            status = await scheduler.status()
            assert status.reason == "waiting for workers: stage 1 rank 0"
            assert [worker.state for worker in status.workers] == ["registered", "missing"]
            async with worker_of(scheduler, stage=1, num_blocks=9, max_model_len=99):
                assert (await anext(watch)).status == health_pb2.HealthCheckResponse.SERVING
                info = (await session.next()).engine_ready
                assert info is not None
                assert info.num_slots == 9 * 4  # the smallest over all ranks
                assert info.max_model_len == 99
                assert (await scheduler.status()).ready
            assert (await anext(watch)).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert (await session.next()).engine_lost


async def test_a_request_from_submit_to_end(start_scheduler: StartScheduler) -> None:
    async with start_scheduler() as scheduler, worker_of(scheduler) as worker, scheduler.session() as session:
        await session.next()
        await session.send(make_submit(5, max_tokens=3))
        for token_id in (11, 12, 13):
            worker.answer(await worker.plans.get(), token_id)
        ended = await session.until_ended(5)
        assert session.tokens == {5: [11, 12, 13]}
        assert ended.reason is FinishReason.LENGTH
        assert ended.queue_ns >= 0
        assert ended.prefill_ns > 0
        assert ended.decode_ns > 0
        status = await scheduler.status()
        assert (status.num_finished, status.num_output_tokens, status.num_steps) == (1, 3, 3)
        assert status.num_used_slots == 0


async def test_log_probabilities_reach_the_gateway_with_their_token(start_scheduler: StartScheduler) -> None:
    async with start_scheduler() as scheduler, worker_of(scheduler) as worker, scheduler.session() as session:
        await session.next()
        await session.send(make_submit(5, prompt=3, max_tokens=1, num_prompt_logprobs=1))
        plan = await worker.plans.get()
        likely = TokenLogprobs(-0.5, ((4, -0.25), (11, -0.5)))
        scored = PromptLogprobs(1, (likely, TokenLogprobs(-2.0)))
        await worker.results.put(
            StepResult(plan.epoch, plan.step_id, [11], logprobs={0: likely}, prompt_logprobs={0: scored})
        )
        events = await session.next()
        assert events.prompt_logprobs == [(Handle(5), scored)]
        assert (events.token_ids, events.token_logprobs) == ([11], {0: likely})
        assert [ended.reason for ended in events.ended] == [FinishReason.LENGTH]


async def test_later_arrivals_join_the_running_batch_and_early_finishers_leave_it(
    start_scheduler: StartScheduler,
) -> None:
    async with start_scheduler() as scheduler, worker_of(scheduler) as worker, scheduler.session() as session:
        await session.next()
        await session.send(make_submit(0, prompt=4, max_tokens=3))
        first = await worker.plans.get()
        await session.send(make_submit(1, prompt=2, max_tokens=1))
        await scheduler.status_where(lambda status: status.num_waiting == 1)
        worker.answer(first, 7)
        second = await worker.plans.get()
        assert second.num_tokens == [1, 2]  # a decode and a whole prompt in one iteration
        worker.answer(second, 8, 9)
        third = await worker.plans.get()
        assert third.num_tokens == [1]
        assert third.released_rows == [1]
        worker.answer(third, 10)
        await session.until_ended(0)
        assert session.tokens == {0: [7, 8, 10], 1: [9]}


async def test_as_many_iterations_in_flight_as_stages(start_scheduler: StartScheduler) -> None:
    async with (
        start_scheduler(num_stages=2, scheduling=replace(ORCA, max_batch_size=1)) as scheduler,
        worker_of(scheduler, stage=0) as first,
        worker_of(scheduler, stage=1) as last,
        scheduler.session() as session,
    ):
        await session.next()
        for handle in range(3):
            await session.send(make_submit(handle, max_tokens=1))
        plans = [await first.plans.get(), await first.plans.get()]
        status = await scheduler.status_where(lambda status: status.num_waiting == 1)
        assert status.num_in_flight_steps == 2
        assert last.plans.empty()  # the scheduler talks to stage 0 only
        last.answer(plans[0], 1)
        last.answer(plans[1], 2)
        last.answer(await first.plans.get(), 3)
        for handle in range(3):
            await session.until_ended(handle)
        assert session.tokens == {0: [1], 1: [2], 2: [3]}


async def test_join_tells_each_rank_its_place_and_its_neighbours(start_scheduler: StartScheduler) -> None:
    async with start_scheduler(num_stages=2, tp_size=2) as scheduler, contextlib.AsyncExitStack() as stack:
        workers = {
            (stage, tp_rank): await stack.enter_async_context(worker_of(scheduler, stage=stage, tp_rank=tp_rank))
            for stage in range(2)
            for tp_rank in range(2)
        }
        await scheduler.status_where(lambda status: status.ready)
        joins = {rank: worker.joins[0] for rank, worker in workers.items()}
        assert joins[0, 0].next_stage_address == workers[1, 0].address
        assert joins[0, 0].tp_addresses == (workers[0, 1].address,)
        assert joins[0, 1].next_stage_address == joins[1, 0].next_stage_address == ""
        assert joins[1, 1].tp_addresses == ()
        assert {join.epoch for join in joins.values()} == {1}


async def test_cancel_frees_at_once_and_drops_the_result(start_scheduler: StartScheduler) -> None:
    async with start_scheduler() as scheduler, worker_of(scheduler) as worker, scheduler.session() as session:
        await session.next()
        await session.send(make_submit(0, max_tokens=50))
        plan = await worker.plans.get()
        await session.send(Cancel(Handle(0)))
        assert (await session.until_ended(0)).reason is FinishReason.CANCELLED
        assert (await scheduler.status()).num_used_slots == 0
        worker.answer(plan, 7)
        await session.send(make_submit(1, max_tokens=1))
        plan = await worker.plans.get()
        assert plan.released_rows == [0]
        worker.answer(plan, 8)
        await session.until_ended(1)
        assert session.tokens == {1: [8]}


async def test_a_gateway_that_is_gone_takes_its_requests_along(start_scheduler: StartScheduler) -> None:
    async with start_scheduler() as scheduler, worker_of(scheduler) as worker:
        async with scheduler.session() as session:
            await session.next()
            await session.send(make_submit(0, max_tokens=50))
            await session.send(make_submit(1, max_tokens=50))
            plan = await worker.plans.get()
        status = await scheduler.status_where(lambda status: status.num_running + status.num_waiting == 0)
        assert status.num_used_slots == 0
        worker.answer(plan, 7)
        await scheduler.status_where(lambda status: status.num_in_flight_steps == 0)


async def test_a_lost_worker_means_a_new_epoch_and_no_lost_or_repeated_token(start_scheduler: StartScheduler) -> None:
    async with start_scheduler() as scheduler, scheduler.session() as session:
        async with worker_of(scheduler) as worker:
            await session.next()
            await session.send(make_submit(0, prompt=3, max_tokens=3))
            worker.answer(await worker.plans.get(), 11)
            await session.until_tokens(0, 1)
            await worker.plans.get()
        while not (await session.next()).engine_lost:
            pass
        status = await scheduler.status_where(lambda status: not status.ready)
        assert status.num_waiting == 1
        async with worker_of(scheduler) as worker:
            plan = await worker.plans.get()
            assert (plan.epoch, plan.step_id) == (2, 0)
            assert list(plan.new_sequences[0].token_ids) == [1, 2, 3, 11]
            worker.answer(plan, 12)
            worker.answer(await worker.plans.get(), 13)
            await session.until_ended(0)
        assert session.tokens == {0: [11, 12, 13]}


async def test_a_result_out_of_order_ends_the_epoch_not_the_request(start_scheduler: StartScheduler) -> None:
    async with start_scheduler() as scheduler, worker_of(scheduler) as worker, scheduler.session() as session:
        await session.next()
        await session.send(make_submit(0, max_tokens=1))
        plan = await worker.plans.get()
        worker.results.put_nowait(StepResult(plan.epoch, StepId(plan.step_id + 5), [7]))
        assert (await session.next()).engine_lost
        assert (await session.next()).engine_ready is not None
        worker.answer(await worker.plans.get(), 8)
        await session.until_ended(0)
        assert session.tokens == {0: [8]}
        assert [join.epoch for join in worker.joins] == [1, 2]


async def test_claims_of_ranks_that_are_taken_or_do_not_exist(start_scheduler: StartScheduler) -> None:
    async with start_scheduler() as scheduler, worker_of(scheduler) as holder:
        with pytest.raises(aio.AioRpcError) as taken:
            async with worker_of(scheduler):
                pass
        assert taken.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert holder.address in str(taken.value.details())
        assert "--stage" in str(taken.value.details())
        with pytest.raises(aio.AioRpcError) as absent:
            async with worker_of(scheduler, stage=3):
                pass
        assert absent.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "stages 0 to 0" in str(absent.value.details())
        assert (await scheduler.status_where(lambda status: status.ready)).ready


async def test_a_worker_that_cannot_be_reached_is_named_and_can_be_replaced(start_scheduler: StartScheduler) -> None:
    async with start_scheduler() as scheduler:
        worker = ScriptedWorker()
        await worker.start()
        dead = worker.address
        await worker.kill()
        async with worker.registered(scheduler.address, address=dead):
            hint = "start the worker with another --advertise-host"  # which the first word of the failure lacks
            status = await scheduler.status_where(lambda status: dead in status.reason and hint in status.reason)
            assert status.workers[0].state == "failed"
        async with worker_of(scheduler):
            await scheduler.status_where(lambda status: status.ready)


async def test_a_model_that_cannot_be_loaded_ends_the_service_with_the_workers_words(
    start_scheduler: StartScheduler,
) -> None:
    with pytest.raises(ExceptionGroup) as failure:  # noqa: PT012
        async with (
            start_scheduler() as scheduler,
            worker_of(scheduler, join_error=ModelError("weights.gguf is truncated; fetch it again")),
        ):
            await asyncio.wait([scheduler.task])
            await scheduler.task
    assert failure.group_contains(ModelError, match="stage 0.*weights.gguf is truncated; fetch it again")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": 300}, "context of 256"),
        ({"prompt": 40, "max_tokens": 30}, "64 K/V slots"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": 0}, "no tokens"),
    ],
)
async def test_what_can_never_be_served_is_refused_at_once(
    start_scheduler: StartScheduler, options: dict[str, int], message: str
) -> None:
    async with start_scheduler() as scheduler, worker_of(scheduler), scheduler.session() as session:
        await session.next()
        await session.send(make_submit(0, **options))  # type: ignore[arg-type]
        ended = await session.until_ended(0)
        assert ended.reason is FinishReason.ERROR
        assert ended.error_code is StatusCode.INVALID_ARGUMENT
        assert message in ended.error_message


async def test_drain_ends_what_runs_and_refuses_what_comes(start_scheduler: StartScheduler) -> None:
    async with start_scheduler() as scheduler, worker_of(scheduler) as worker, scheduler.session() as session:
        await session.next()
        await session.send(make_submit(0, max_tokens=1))
        plan = await worker.plans.get()
        scheduler.shutdown.request("SIGTERM")
        async with connect(scheduler.address) as channel:
            watch = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
            while (await anext(watch)).status != health_pb2.HealthCheckResponse.NOT_SERVING:
                pass
        await session.send(make_submit(1))
        refused = await session.until_ended(1)
        assert refused.error_code is StatusCode.UNAVAILABLE
        worker.answer(plan, 7)
        assert (await session.until_ended(0)).reason is FinishReason.LENGTH
        await scheduler.task


async def test_a_worker_that_wants_to_leave_waits_for_what_runs_and_nothing_new_comes(
    start_scheduler: StartScheduler,
) -> None:
    async with (
        start_scheduler() as scheduler,
        worker_of(scheduler) as worker,
        scheduler.session() as session,
        connect(scheduler.address) as channel,
    ):
        leave = worker_pb2_grpc.WorkerRegistryStub(channel).Leave
        await session.next()
        await session.send(make_submit(0, max_tokens=1))
        plan = await worker.plans.get()
        await leave(worker_pb2.LeaveRequest(address="somebody:1"))
        assert (await scheduler.status()).ready, "only the one who holds the rank is heard"
        leaving = asyncio.ensure_future(leave(worker_pb2.LeaveRequest(address=worker.address)))
        assert (await session.next()).engine_lost, "for new requests it is"
        status = await scheduler.status()
        assert (status.ready, status.reason) == (False, "the worker of stage 0, tensor-parallel rank 0 is leaving")
        assert not leaving.done()
        worker.answer(plan, 7)
        assert (await session.until_ended(0)).reason is FinishReason.LENGTH
        await leaving
    assert session.tokens == {0: [7]}


async def test_a_session_says_hello_first_and_once(start_scheduler: StartScheduler) -> None:
    async with start_scheduler() as scheduler:
        for messages in ([make_submit(0)], [Hello("one"), Hello("two")]):
            async with scheduler.session(*messages) as session:
                with pytest.raises(aio.AioRpcError) as refused:
                    await session.next()
                assert refused.value.code() is grpc.StatusCode.ABORTED


async def test_port_in_use_is_a_clear_error(start_scheduler: StartScheduler) -> None:
    async with start_scheduler() as scheduler:
        port = int(scheduler.address.rpartition(":")[2])
        config = SchedulerConfig(listen=ListenConfig(port=port), engine=EngineConfig())
        with pytest.raises(ConfigError, match="port is in use"):
            await run_scheduler(config, Shutdown(1))


def test_the_process_stays_small_and_never_imports_torch() -> None:
    script = (
        "import sys, services.scheduler.app\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert int(out.stdout) < 120 * 1024  # KiB


async def test_an_address_of_something_else_does_not_end_the_service(start_scheduler: StartScheduler) -> None:
    async with start_scheduler() as scheduler:
        impostor = ScriptedWorker()
        async with impostor.registered(scheduler.address, address=scheduler.address):
            status = await scheduler.status_where(lambda status: "another kind" in status.reason)
            assert status.workers[0].state == "failed"
        async with worker_of(scheduler):
            await scheduler.status_where(lambda status: status.ready)


async def test_a_worker_that_hangs_is_told_and_the_next_epoch_goes_on(start_scheduler: StartScheduler) -> None:
    async with (
        start_scheduler(collective_timeout_s=1) as scheduler,
        worker_of(scheduler) as worker,
        scheduler.session() as session,
    ):
        await session.next()
        await session.send(make_submit(0, max_tokens=1))
        await worker.plans.get()  # and never answers
        assert (await session.next()).engine_lost
        assert "a worker hangs" in (await scheduler.status()).reason
        worker.answer(await worker.plans.get(), 7)
        await session.until_ended(0)
        assert session.tokens == {0: [7]}


async def test_requests_that_wait_while_nothing_is_done_are_told_and_the_next_epoch_goes_on(
    start_scheduler: StartScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        start_scheduler(collective_timeout_s=1) as scheduler,
        worker_of(scheduler) as worker,
        scheduler.session() as session,
    ):
        await session.next()
        with monkeypatch.context() as patch:
            patch.setattr(SchedulerCore, "schedule", lambda *_: None)
            await session.send(make_submit(0, max_tokens=1))
            assert (await session.next()).engine_lost
        assert "1 requests wait and 0 have started" in (await scheduler.status()).reason
        worker.answer(await worker.plans.get(), 7)
        await session.until_ended(0)
        assert session.tokens == {0: [7]}


async def test_a_worker_that_takes_no_more_control_messages_is_lost(start_scheduler: StartScheduler) -> None:
    async with start_scheduler() as scheduler, scheduler.session() as session:
        async with worker_of(scheduler, reads_plans=False) as worker:
            await session.next()
            # More than a stream holds before it pushes back: the write is pending when the epoch ends.
            for handle in range(40):
                await session.send(make_submit(handle, prompt=40, max_tokens=2))
            await scheduler.status_where(lambda status: status.num_in_flight_steps == 1)
            await worker.kill()
        while not (await session.next()).engine_lost:
            pass
        async with worker_of(scheduler) as worker:
            worker.answer(await worker.plans.get(), 7)
            assert (await scheduler.status()).ready
