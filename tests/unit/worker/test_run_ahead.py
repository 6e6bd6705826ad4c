"""Plans that arrive long before the tokens they compute: every sequence gets what it would get alone.

All plans are submitted before the first is computed, as far ahead as can be, while sequences end, are preempted and
give their rows to others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import torch

from services.worker.executor import Executor
from shared.clock import ManualClock
from tests.fakes.fake_stage import MAX_MODEL_LEN, NUM_BLOCKS, VOCAB_SIZE, assemble
from tests.fakes.fake_worker_peers import columns, join_request, sequence

if TYPE_CHECKING:
    from torch import Tensor

    from services.worker.batch import ForwardBatch
    from services.worker.kv_cache import KvCache
    from services.worker.outcome import Outcome
    from shared.codec.step_columns import StepColumns

BLOCK_SIZE = 16


def next_token(token: int, position: int) -> int:
    return (5 * token + 3 * position + 1) % VOCAB_SIZE


class NextTokenStage:
    """Its token depends on the one before and on where that stands: a late token that is wrong changes all after it."""

    def forward(self, batch: ForwardBatch, hidden: Tensor | None, kv: KvCache) -> Tensor:
        del hidden, kv
        return ((5 * batch.token_ids + 3 * batch.positions + 1) % VOCAB_SIZE).to(torch.float32).unsqueeze(-1)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden_rows[:, 0].long(), VOCAB_SIZE).float()


def compute(plans: list[StepColumns]) -> list[list[int]]:
    outcomes: list[Outcome] = []

    def on_step(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if len(outcomes) == len(plans):
            executor.stop()

    executor = Executor(
        join_request(workers_append_tokens=True), assemble(NextTokenStage()), clock=ManualClock(), on_step=on_step
    )
    for step in plans:
        executor.submit(step, 0)
    assert executor.run() is None
    return [outcome.result().token_ids for outcome in outcomes]


@dataclass
class _Running:
    tokens: list[int]
    """The prompt, and what it must get."""
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)


@pytest.mark.parametrize("seed", range(30))
def test_rows_that_change_hands_never_see_the_token_of_another(seed: int) -> None:
    rng = random.Random(seed)
    running: dict[int, _Running] = {}
    preempted: list[_Running] = []
    free_blocks = list(range(NUM_BLOCKS))
    plans, expected = [], []
    for step_id in range(80):
        released = [row for row in running if rng.random() < 0.1 or len(running[row].tokens) == MAX_MODEL_LEN]
        for row in released:
            gone = running.pop(row)
            free_blocks += gone.blocks
            if rng.random() < 0.5 and len(gone.tokens) < MAX_MODEL_LEN:  # its last token may be lost with its row
                preempted.append(_Running(gone.tokens[: max(1, len(gone.tokens) - rng.randrange(3))]))
        new = []
        for row in rng.sample(range(8), 3):
            if row not in running and len(running) < 6:
                fresh = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 9))]
                running[row] = preempted.pop() if preempted else _Running(fresh)
                new.append(sequence(row, running[row].tokens))
        entries, samples, blocks, tokens = [], [], list[list[int]](), []
        for row in rng.sample(sorted(running), rng.randint(0, len(running))):
            one = running[row]
            uncomputed = len(one.tokens) - one.num_computed
            num_tokens = rng.randint(1, uncomputed)
            entries.append((row, one.num_computed, num_tokens))
            one.num_computed += num_tokens
            samples.append(num_tokens == uncomputed)
            missing = -(-one.num_computed // BLOCK_SIZE) - len(one.blocks)
            blocks.append([free_blocks.pop() for _ in range(missing)])
            one.blocks += blocks[-1]
            if samples[-1]:
                tokens.append(next_token(one.tokens[-1], len(one.tokens) - 1))
                one.tokens.append(tokens[-1])
        expected.append(tokens)
        plans.append(
            columns(
                step_id,
                *entries,
                samples=samples,
                released_rows=released,
                new_sequences=new,
                num_new_blocks=[len(ids) for ids in blocks],
                new_block_ids=[block for ids in blocks for block in ids],
            )
        )
    assert sum(map(len, expected)) > 100
    assert compute(plans) == expected
