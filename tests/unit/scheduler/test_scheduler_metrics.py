"""The scheduler's metrics balance, whatever happens to its sequences."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.capacity import Capacity
from services.scheduler.core.core import SchedulerCore
from services.scheduler.loop import EngineLoop
from services.scheduler.metrics import EngineMetrics, LoopMetrics
from services.scheduler.outbox import Outbox
from shared.clock import ManualClock
from shared.config import SchedulingConfig
from shared.ids import Epoch, Handle
from shared.messages import Cancel, EngineInfo, EngineStatus
from shared.metrics import ServiceMetrics
from tests.exposition import Exposition, faults
from tests.factories import make_result, make_submit

if TYPE_CHECKING:
    from services.scheduler.epoch import EngineLink
    from shared.errors import EngineLostError
    from shared.messages import StepPlan

SCHEDULING = SchedulingConfig(max_batch_size=3, max_batch_tokens=8, max_waiting=4)
CAPACITY = Capacity(num_blocks=6, block_size=4, num_stages=2, max_model_len=64, vocab_size=1000)
INFO = EngineInfo("test", 64, 1000, CAPACITY.num_slots, 4, 2, 1, "float32")
STEP_NS = 5_000_000


@dataclass
class FakeLink:
    """An engine that computes when it is told to."""

    epoch: Epoch
    capacity: Capacity = CAPACITY
    info: EngineInfo = INFO
    plans: list[StepPlan] = field(default_factory=list)

    def send(self, plan: StepPlan) -> None:
        self.plans.append(plan)


class Scheduler:
    """A loop, its metrics, and the hands that drive it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.loop_metrics = LoopMetrics()
        self.loop = EngineLoop(SchedulerCore(SCHEDULING), self.clock, self.loop_metrics)
        self.link = FakeLink(Epoch(0))
        self.metrics = ServiceMetrics("scheduler")
        self.metrics.add(self.loop_metrics, EngineMetrics(self._status))
        self.outbox = Outbox("gateway")
        self.num_submitted = 0
        self.loop.open_session(self.outbox)

    def _status(self) -> EngineStatus:
        stats = self.loop.stats()
        return EngineStatus(
            ready=self.loop.info is not None,
            reason="",
            epoch=self.link.epoch,
            info=self.loop.info,
            workers=(),
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_in_flight_steps=stats.num_in_flight_steps,
            num_used_slots=stats.num_used_slots,
            num_cached_slots=stats.num_cached_slots,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_output_tokens=stats.num_output_tokens,
        )

    def submit(self, prompt: int, max_tokens: int) -> None:
        self.num_submitted += 1
        self.loop.command(self.outbox, make_submit(self.num_submitted, prompt=prompt, max_tokens=max_tokens))

    def cancel(self, which: int) -> None:
        self.loop.command(self.outbox, Cancel(Handle(which % (self.num_submitted + 1))))

    def compute(self) -> None:
        self.clock.advance(STEP_NS)
        if self.link.plans:
            self.loop.deliver(make_result(self.link.plans.pop(0)))

    def epoch(self) -> None:
        self.loop.end_epoch()
        self.link = FakeLink(Epoch(self.link.epoch + 1))
        self.loop.begin_epoch(cast("EngineLink", self.link), _ignore)

    def close_session(self) -> None:
        self.loop.close_session(self.outbox)
        self.outbox = Outbox("gateway")
        self.loop.open_session(self.outbox)

    def scrape(self) -> Exposition:
        body, content_type = self.metrics.render()
        return Exposition.of(body.decode(), content_type)


def _ignore(lost: EngineLostError) -> None:
    raise AssertionError(lost)


async def turn() -> None:
    """Let the loop's task do all that is due."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(done.set_result, None)
    await done


@contextlib.asynccontextmanager
async def running() -> Any:
    scheduler = Scheduler()
    task = asyncio.create_task(scheduler.loop.run())
    await turn()
    try:
        yield scheduler
    finally:
        task.cancel()
        await asyncio.wait([task])


def check_balance(scheduler: Scheduler) -> None:
    found = scheduler.scrape()
    assert found.value("orca_sequences_submitted_total") == scheduler.num_submitted
    assert found.value("orca_sequences_submitted_total") == (
        found.total("orca_sequences_ended_total")
        + found.value("orca_num_requests_running")
        + found.value("orca_num_requests_waiting")
    )
    in_flight = found.value("orca_iterations_in_flight")
    assert in_flight == len(scheduler.link.plans)
    assert not faults(found)


operations = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 30), st.integers(1, 12)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("compute")),
    st.tuples(st.just("compute")),
    st.tuples(st.just("epoch")),
    st.tuples(st.just("close_session")),
)


@given(st.lists(operations, max_size=40))
@settings(deadline=None, max_examples=60)
def test_submitted_is_ended_and_running_and_waiting(script: list[tuple[Any, ...]]) -> None:
    async def play() -> None:
        async with running() as scheduler:
            scheduler.epoch()
            await turn()
            for name, *arguments in script:
                getattr(scheduler, name)(*arguments)
                await turn()
                check_balance(scheduler)
            while scheduler.link.plans:
                scheduler.compute()
                await turn()
            check_balance(scheduler)
            assert scheduler.scrape().total("orca_sequences_ended_total") == scheduler.num_submitted

    asyncio.run(play())


async def test_times_and_sizes_of_iterations() -> None:
    async with running() as scheduler:
        scheduler.epoch()
        scheduler.submit(5, 2)
        scheduler.submit(3, 1)
        await turn()
        while scheduler.link.plans:
            scheduler.compute()
            await turn()
        found = scheduler.scrape()
        num_iterations = found.value("orca_iteration_duration_seconds_count")
        assert num_iterations >= 2
        assert found.value("orca_iteration_duration_seconds_sum") >= num_iterations * STEP_NS / 1e9
        assert found.value("orca_iteration_requests_count") == num_iterations
        # Every token but the last of each output is computed once.
        assert found.value("orca_iteration_tokens_sum") == (5 + 1) + 3
        assert found.value("orca_prompt_tokens_total") == 8
        assert found.value("orca_generation_tokens_total") == 3
        assert found.value("orca_sequences_ended_total", reason="length", code="OK") == 2
        assert found.value("orca_request_queue_time_seconds_count") == 2
        # Two stages: the iteration of the other request comes back in between.
        assert found.value("orca_request_decode_time_seconds_sum") == 2 * STEP_NS / 1e9
        assert found.value("orca_kv_cache_usage_ratio") == 0


async def test_refusals_say_why() -> None:
    async with running() as scheduler:
        scheduler.epoch()
        scheduler.submit(60, 60)
        for _ in range(SCHEDULING.max_batch_size + SCHEDULING.max_waiting + 2):
            scheduler.submit(4, 8)
        await turn()
        found = scheduler.scrape()
        assert found.value("orca_sequences_ended_total", reason="refused", code="INVALID_ARGUMENT") == 1
        assert found.value("orca_sequences_ended_total", reason="refused", code="RESOURCE_EXHAUSTED") >= 1


async def test_a_lost_engine_leaves_no_iteration_behind() -> None:
    async with running() as scheduler:
        scheduler.epoch()
        scheduler.submit(4, 4)
        await turn()
        assert scheduler.scrape().value("orca_iterations_in_flight") > 0
        scheduler.clock.advance(3600 * 10**9)
        scheduler.epoch()
        await turn()
        scheduler.compute()
        await turn()
        found = scheduler.scrape()
        assert found.value("orca_epochs_total") == 2
        assert found.value("orca_iteration_duration_seconds_sum") == STEP_NS / 1e9
