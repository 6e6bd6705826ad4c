"""The compute loop by itself: plans in, results out, in the test's own thread."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
import torch

from services.worker.executor import Executor
from services.worker.timeline import Timeline
from shared.clock import ManualClock
from shared.errors import EngineLostError, OrcaError, ProtocolError
from shared.messages import SamplingParams, StepResult
from tests.fakes.fake_stage import VOCAB_SIZE, assemble
from tests.fakes.fake_worker_peers import columns, join_request, sequence

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.native.head import GreedyHead
    from services.worker.batch import ForwardBatch
    from services.worker.kv_cache import KvCache
    from services.worker.outcome import Outcome
    from shared.codec.step_columns import StepColumns


class FakeStage:
    """Says token 5 everywhere; a row that ends in token 3 has logits that are not numbers, token 4 raises."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def forward(self, batch: ForwardBatch, hidden: Tensor | None, kv: KvCache) -> Tensor:
        assert hidden is None
        self._clock.advance(1000)
        if (batch.token_ids == 4).any():
            raise RuntimeError("out of order\nand more")
        return batch.token_ids.to(torch.float32).unsqueeze(-1)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        logits = torch.zeros(len(hidden_rows), VOCAB_SIZE)
        logits[:, 5] = 1.0
        logits[hidden_rows[:, 0] == 3] = float("nan")
        return logits


class NineAlways:
    """Stands for a greedy head: token 9 for every row but those that end in token 3, which it finds invalid."""

    def __call__(self, hidden: Tensor, rows: Tensor) -> tuple[Tensor, list[int]]:
        invalid = hidden[rows, 0] == 3
        return torch.where(invalid, 0, 9), invalid.nonzero().flatten().tolist()


def run(
    *plans: StepColumns, append: bool = False, greedy: NineAlways | None = None
) -> tuple[list[StepResult], OrcaError | None, Timeline]:
    clock, timeline, results = ManualClock(), Timeline(), list[StepResult]()

    def on_step(outcome: Outcome) -> None:
        timeline.add(outcome.timing())
        results.append(outcome.result())
        if len(results) == len(plans):
            executor.stop()

    assembly = assemble(FakeStage(clock))
    # A head of the compiled kernels is called in the same way.
    assembly = replace(assembly, loaded=replace(assembly.loaded, greedy=cast("GreedyHead | None", greedy)))
    executor = Executor(join_request(workers_append_tokens=append), assembly, clock=clock, on_step=on_step)
    for step in plans:
        executor.submit(step, clock.now_ns())
    return results, executor.run(), timeline


def prefills(*prompts: list[int], sampling: SamplingParams | None = None) -> StepColumns:
    return columns(
        0,
        *((row, 0, len(prompt)) for row, prompt in enumerate(prompts)),
        new_sequences=[sequence(row, prompt, sampling) for row, prompt in enumerate(prompts)],
        num_new_blocks=[1] * len(prompts),
        new_block_ids=list(range(len(prompts))),
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_with_broken_logits_is_named_and_the_others_go_on(temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=1 if temperature else 0)
    results, failure, _ = run(prefills([1, 2], [1, 3], [7], sampling=sampling))
    assert failure is None
    assert (results[0].token_ids, results[0].invalid) == ([5, 0, 5], [1])


@pytest.mark.parametrize("append", [False, True])
def test_where_all_are_greedy_nobody_makes_logits(append: bool) -> None:
    greedy, drawn = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_k=2)
    results, failure, _ = run(prefills([1, 2], [1, 3], sampling=greedy), append=append, greedy=NineAlways())
    assert failure is None
    assert (results[0].token_ids, results[0].invalid) == ([9, 0], [1])
    for other in (drawn, replace(greedy, num_logprobs=1), replace(greedy, logit_bias=((7, 50.0),))):
        mixed = columns(
            0,
            (0, 0, 1),
            (1, 0, 1),
            new_sequences=[sequence(0, [1], greedy), sequence(1, [2], other)],
            num_new_blocks=[1, 1],
            new_block_ids=[0, 1],
        )
        results, failure, _ = run(mixed, append=append, greedy=NineAlways())
        assert failure is None
        assert results[0].token_ids[0] == 5


def test_times_are_of_the_compute() -> None:
    results, failure, timeline = run(prefills([1, 2]), columns(1), columns(2, (0, 1, 1)))
    assert failure is None
    assert [result.compute_ns for result in results] == [1000, 0, 1000]
    assert [(timing.started_ns, timing.ended_ns) for timing in timeline.latest()] == [
        (0, 1000),
        (1000, 1000),
        (1000, 2000),
    ]
    assert [timing.num_sequences for timing in timeline.latest()] == [1, 0, 1]


def test_failing_compute_is_told_with_its_step_and_ends_the_loop() -> None:
    results, failure, _ = run(prefills([1, 2]), columns(1, (0, 1, 1), num_appended_tokens=[1], appended_token_ids=[2]))
    assert failure is None
    assert len(results) == 2
    results, failure, _ = run(prefills([4]), columns(1))
    assert results == []
    assert isinstance(failure, EngineLostError)
    assert "stage 0, rank 0 failed at step 0 (RuntimeError: out of order)" in str(failure)
    assert failure.__traceback__ is None
    assert failure.__context__ is None


def test_plan_that_does_not_fit_ends_the_loop() -> None:
    results, failure, _ = run(prefills([1]), columns(1, (9, 0, 1)), columns(2))
    assert len(results) == 1
    assert isinstance(failure, ProtocolError)
    assert "step 1 computes row 9" in str(failure)


def test_running_ahead_a_plan_need_not_bring_the_token_before() -> None:
    plans = (prefills([1, 2]), columns(1, (0, 2, 1)))
    results, failure, _ = run(*plans, append=True)
    assert failure is None
    assert [result.token_ids for result in results] == [[5], [5]]
    _, failure, _ = run(*plans)
    assert isinstance(failure, ProtocolError)
