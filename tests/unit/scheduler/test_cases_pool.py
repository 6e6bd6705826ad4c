"""Scenarios 35 and 36 in virtual time, an iteration a tick: small pools, long requests and short ones.

What is promised: nobody overtakes; whoever came first is never preempted; anybody else at most once for each block of
his own, since a request starts only where it can go on for a while; everybody ends.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from services.scheduler.core.capacity import Capacity
from services.scheduler.core.core import SchedulerCore
from shared.config import SchedulingConfig
from shared.errors import InvalidRequestError
from shared.ids import Epoch
from tests.factories import make_result, make_submit

if TYPE_CHECKING:
    from services.scheduler.core.events import TokenEvent
    from shared.messages import StepResult

POLICIES = pytest.mark.parametrize("kv_policy", ["paged", "reserve"])


@dataclass
class Life:
    """What became of a request, in iterations."""

    num_prompt: int
    num_output: int
    arrived: int
    first_token: int = 0
    ended: int = 0
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """That must be computed once: the last one is not."""
        return self.num_prompt + self.num_output - 1

    @property
    def waited(self) -> int:
        return self.first_token - self.arrived


@dataclass
class Simulation:
    """A core, and an engine each of whose stages takes a tick."""

    num_blocks: int
    block_size: int
    scheduling: SchedulingConfig
    num_stages: int = 1
    now: int = 0
    lives: list[Life] = field(default_factory=list)
    num_computed: int = 0
    in_flight: deque[StepResult] = field(default_factory=deque)
    core: SchedulerCore = field(init=False)

    def __post_init__(self) -> None:
        self.core = SchedulerCore(replace(self.scheduling, run_ahead=0))
        self.core.engine_ready(Epoch(1), Capacity(self.num_blocks, self.block_size, self.num_stages, 1024, 1000))

    def arrive(self, num_prompt: int, num_output: int) -> Life:
        self.core.add("gateway", make_submit(len(self.lives), prompt=num_prompt, max_tokens=num_output), self.now)
        self.lives.append(Life(num_prompt, num_output, self.now))
        return self.lives[-1]

    def tick(self) -> None:
        """An iteration enters the pipeline, and the oldest leaves it where it is full."""
        self.now += 1
        plan = self.core.schedule(self.now)
        if plan is not None:
            self.num_computed += sum(plan.num_tokens)
            self.in_flight.append(make_result(plan))
        assert self.in_flight or self.core.idle, "requests wait, and nothing moves"
        if len(self.in_flight) == self.num_stages or (plan is None and self.in_flight):
            self._hear(self.core.apply(self.in_flight.popleft(), self.now))
        self.core.check_invariants()

    def _hear(self, events: list[TokenEvent]) -> None:
        for event in events:
            life = self.lives[event.key[1]]
            if event.token_id is not None:
                life.first_token = life.first_token or self.now
            if event.finished is not None:
                assert event.sequence is not None
                life.ended, life.num_preemptions = self.now, event.sequence.num_preemptions

    def run(self) -> None:
        while not self.core.idle:
            self.tick()

    @property
    def recomputed_share(self) -> float:
        return 1 - sum(life.num_tokens for life in self.lives) / self.num_computed


def paged(**fields: object) -> SchedulingConfig:
    defaults = SchedulingConfig(max_batch_size=8, max_batch_tokens=32, prefix_cache=False)
    return replace(defaults, **fields)  # type: ignore[arg-type]


@POLICIES
def test_what_fits_by_itself_ends_and_what_does_not_is_refused(kv_policy: str) -> None:
    simulation = Simulation(20, 16, paged(kv_policy=kv_policy))
    for num_prompt, num_output in ((400, 1), (200, 400), (320, 1)):
        with pytest.raises(InvalidRequestError, match="320 K/V slots"):
            simulation.arrive(num_prompt, num_output)
    for num_prompt, num_output in ((170, 150), (170, 150), *[(100, 100)] * 8, (319, 1)):
        simulation.arrive(num_prompt, num_output)
    simulation.run()
    assert [life.ended > 0 for life in simulation.lives] == [True] * 11
    assert [life.first_token for life in simulation.lives] == sorted(life.first_token for life in simulation.lives)
    assert simulation.core.stats().num_used_slots == 0


@pytest.mark.parametrize(("num_prompt", "num_output"), [(64, 64), (16, 112)])
def test_four_long_ones_in_a_pool_for_three_and_short_ones_all_the_time(num_prompt: int, num_output: int) -> None:
    simulation = Simulation(96, 4, paged())
    long = [simulation.arrive(num_prompt, num_output) for _ in range(4)]
    short = []
    for tick in range(600):
        if tick % 3 == 0:
            short.append(simulation.arrive(4, 4))
        simulation.tick()
    simulation.run()
    assert max(life.num_preemptions for life in simulation.lives) <= 1
    assert [life.num_preemptions for life in long[:3]] == [0, 0, 0]
    assert simulation.recomputed_share < 0.05
    alone = num_prompt // 32 + num_output
    assert max(life.ended for life in long[:3]) <= alone + 8, "the first three hardly notice"
    assert long[3].ended <= 2 * alone, "the fourth waits for one of them at most"
    assert max(life.waited for life in short) <= alone, "nor does anybody who is behind it"
    assert sum(life.waited for life in short) / len(short) < 4


def test_a_flood_of_short_ones_does_not_hold_up_a_long_one() -> None:
    simulation = Simulation(96, 4, paged())
    simulation.arrive(4, 4)
    long = simulation.arrive(64, 64)
    for _ in range(200):
        for _ in range(2):
            simulation.arrive(4, 4)
        simulation.tick()
    assert long.ended <= 64 // 32 + 64 + 4
    assert long.num_preemptions == 0
    simulation.run()
    assert simulation.core.idle


def test_nobody_is_preempted_for_ever() -> None:
    """Any mixture that fits: preemptions are bounded by a request's own blocks, and so is what is computed twice."""
    shares = []
    for seed in range(60):
        chosen = random.Random(seed)
        block_size, num_blocks = chosen.choice([2, 4, 8]), chosen.choice([16, 24, 48])
        limits = {"max_batch_size": chosen.choice([4, 8, 16]), "max_batch_tokens": chosen.choice([16, 32])}
        simulation = Simulation(num_blocks, block_size, paged(**limits), num_stages=chosen.choice([1, 2]))
        num_slots = num_blocks * block_size
        for _ in range(40):
            num_prompt = chosen.randrange(1, num_slots // 2)
            simulation.arrive(num_prompt, chosen.randrange(1, num_slots - num_prompt + 1))
        simulation.run()
        for life in simulation.lives:
            assert life.num_preemptions <= -(-(life.num_prompt + life.num_output) // block_size)
        assert simulation.lives[0].num_preemptions == 0
        shares.append(simulation.recomputed_share)
    assert max(shares) < 0.5, "even where each request wants half of the pool and more"
    assert sum(shares) / len(shares) < 0.35
