"""A worker as the scheduler's core must see it: tables fed by diffs alone, and K/V that remembers what was written.

Its model is a pure function of the tokens before, so what a request gets is known beforehand, whatever else happens.
Every slot remembers the whole prefix that it was computed for: reading a slot that belongs to somebody else fails at
once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared.messages import PromptLogprobs, StepPlan, StepResult, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["STOP", "ModelWorker", "next_token", "reference"]

STOP = 99


def next_token(tokens: Sequence[int]) -> int:
    """The model: a number from 1 to 3, or now and then STOP."""
    state = 17
    for token in tokens:
        state = (state * 31 + token) % 1009
    return STOP if state % 11 == 0 else 1 + state % 3


def reference(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What a request must get."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == STOP:
            break
    return tokens[len(prompt) :]


@dataclass
class _Row:
    tokens: list[int]
    num_scored: int = 0
    """Prompt tokens, where the prompt is scored."""
    blocks: list[int] = field(default_factory=list)


class ModelWorker:
    """Runs plans in order and checks that each makes sense."""

    def __init__(self, num_blocks: int, block_size: int, *, appends: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.appends = appends
        self.rows: dict[int, _Row] = {}
        self.slots: dict[int, tuple[int, ...]] = {}
        self.next_step = 0

    def run(self, plan: StepPlan) -> StepResult:
        """Learn the diff, write K/V, read it all back, sample."""
        assert plan.step_id == self.next_step
        self.next_step += 1
        for released in plan.released_rows:
            del self.rows[released]
        for sequence in plan.new_sequences:
            assert sequence.row not in self.rows
            num_scored = 0 if sequence.num_prompt_logprobs is None else sequence.num_prompt_tokens
            self.rows[sequence.row] = _Row(list(sequence.token_ids), num_scored)
        assert len(set(plan.rows)) == len(plan.rows)
        appended, new_blocks = iter(plan.appended_token_ids), iter(plan.new_block_ids)
        sampled = []
        scored = {}
        for entry, row_id in enumerate(plan.rows):
            row = self.rows[row_id]
            row.tokens += [next(appended) for _ in range(plan.num_appended_tokens[entry])]
            row.blocks += [next(new_blocks) for _ in range(plan.num_new_blocks[entry])]
            start, end = plan.num_computed_tokens[entry], plan.num_computed_tokens[entry] + plan.num_tokens[entry]
            assert start < end <= len(row.tokens)
            assert plan.samples[entry] == (end == len(row.tokens))
            for position in range(start, end):
                self.slots[self._slot(row, position)] = tuple(row.tokens[: position + 1])
            for position in range(end):
                assert self.slots[self._slot(row, position)] == tuple(row.tokens[: position + 1])
            # What the logits of these positions predict of the prompt.
            if predicted := range(start + 1, min(end + 1, row.num_scored)):
                scored[entry] = PromptLogprobs(predicted.start, tuple(TokenLogprobs(-float(p)) for p in predicted))
            if plan.samples[entry]:
                sampled.append(next_token(row.tokens))
                if self.appends:
                    row.tokens.append(sampled[-1])
        assert next(appended, None) is None
        assert next(new_blocks, None) is None
        return StepResult(plan.epoch, plan.step_id, sampled, prompt_logprobs=scored)

    def _slot(self, row: _Row, position: int) -> int:
        block = row.blocks[position // self.block_size]
        assert 0 <= block < self.num_blocks
        return block * self.block_size + position % self.block_size
