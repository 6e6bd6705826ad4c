from __future__ import annotations

from services.scheduler.stage_log import StageLog
from shared.clock import ManualClock
from shared.errors import UnavailableError
from shared.ids import StepId
from shared.mesh_view import MAX_STEPS
from shared.messages import StepTiming
from shared.worker_client import WorkerTimeline


def step(step_id: int, ended_ns: int = 0, *, decodes: int = 1, tokens: int = 1) -> StepTiming:
    return StepTiming(StepId(step_id), ended_ns - 20, ended_ns - 10, ended_ns, decodes, tokens, decodes)


class Worker:
    """Answers after ``round_trip_ns`` of our clock, by a clock that is ``ahead_ns`` of ours."""

    def __init__(self, clock: ManualClock, *, ahead_ns: int = 0, round_trip_ns: int = 100) -> None:
        self.clock = clock
        self.ahead_ns = ahead_ns
        self.round_trip_ns = round_trip_ns
        self.steps: list[StepTiming] = []
        self.asked: list[StepId | None] = []
        self.dead = False

    async def timeline(
        self, max_steps: int = 0, *, after: StepId | None = None, timeout_s: float = 0
    ) -> WorkerTimeline:
        self.asked.append(after)
        if self.dead:
            raise UnavailableError("gone")
        self.clock.advance(self.round_trip_ns // 2)
        present = self.clock.now_ns() + self.ahead_ns
        self.clock.advance(self.round_trip_ns - self.round_trip_ns // 2)
        return WorkerTimeline(present, [known for known in self.steps if after is None or known.step_id > after])

    async def close(self) -> None:
        pass


async def test_only_what_is_new_is_asked_for() -> None:
    clock = ManualClock(1000)
    worker = Worker(clock)
    log = StageLog(3, worker, clock)
    worker.steps = [step(0, 100), step(1, 200)]
    await log.fetch()
    worker.steps.append(step(2, 300))
    await log.fetch()
    worker.dead = True
    await log.fetch()
    assert worker.asked == [None, 1, 2]
    assert log.after(None).stage == 3
    assert [known.step_id for known in log.after(None).steps] == [0, 1, 2]
    assert [known.step_id for known in log.after(StepId(0)).steps] == [1, 2]
    assert log.after(StepId(2)).steps == ()


async def test_the_latest_are_kept_and_prompts_are_counted() -> None:
    clock = ManualClock(1000)
    worker = Worker(clock)
    log = StageLog(0, worker, clock)
    worker.steps = [step(number, decodes=2, tokens=5) for number in range(MAX_STEPS + 10)]
    assert await log.fetch() == 3 * (MAX_STEPS + 10)
    assert [known.step_id for known in log.after(None).steps] == list(range(10, MAX_STEPS + 10))
    assert await log.fetch() == 0


async def test_the_clock_of_our_own_host_is_not_translated() -> None:
    clock = ManualClock(1000)
    worker = Worker(clock, ahead_ns=40)  # within half a round trip: the same clock, and a quick answer
    worker.steps = [step(0, 100)]
    log = StageLog(0, worker, clock)
    await log.fetch()
    assert log.after(None).steps == (step(0, 100),)


async def test_the_clock_of_another_host_is_translated_by_the_quickest_answer() -> None:
    clock = ManualClock(1_000_000)
    worker = Worker(clock, ahead_ns=5_000_000, round_trip_ns=1000)
    worker.steps = [step(0, 5_900_000)]
    log = StageLog(0, worker, clock)
    await log.fetch()
    assert log.after(None).steps == (step(0, 900_000),)
    worker.round_trip_ns, worker.ahead_ns = 5000, 7_000_000  # a slow answer tells less
    worker.steps.append(step(1, 5_950_000))
    await log.fetch()
    assert log.after(StepId(0)).steps == (step(1, 950_000),)


async def test_what_was_before_our_host_began_is_not_negative() -> None:
    clock = ManualClock(1000)
    worker = Worker(clock, ahead_ns=1_000_000)
    worker.steps = [step(0, 500_000)]
    log = StageLog(0, worker, clock)
    await log.fetch()
    assert log.after(None).steps == (StepTiming(StepId(0), 0, 0, 0, 1, 1, 1),)
