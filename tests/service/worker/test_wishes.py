"""What requests want besides a draw, at every topology: log probabilities, penalties, grammars."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from llguidance import LLMatcher

from shared.messages import SamplingParams
from shared.text.byte_tokenizer import ByteTokenizer
from tests.fakes.fake_worker_peers import FakeRegistry, join_all, plan, sequence, spawned_worker

if TYPE_CHECKING:
    from shared.messages import NewSequence, PromptLogprobs, StepPlan, StepResult, TokenLogprobs

PROMPT = list(range(60, 90))
NUM_STEPS = 8
TOKENIZER = ByteTokenizer(512)

SCORED = replace(
    sequence(0, PROMPT, SamplingParams(temperature=0.7, seed=5, num_logprobs=3, frequency_penalty=0.5, min_tokens=99)),
    num_prompt_logprobs=2,
    stop_token_ids=frozenset({256}),
)
GUIDED = replace(sequence(1, PROMPT[:9], SamplingParams(seed=6)), grammar=LLMatcher.grammar_from_regex("[0-9a-f]{60}"))
BROKEN = replace(sequence(2, PROMPT[:4]), grammar="{")
PLAIN = sequence(3, PROMPT[:5], SamplingParams(seed=7))
BLOCKS = {row: [4 * row + block for block in range(4)] for row in range(5)}


def next_plan(step_id: int, tokens: dict[int, list[int]] | None) -> StepPlan:
    """A prompt of two pieces, then four rows that decode, of which the broken one leaves.

    ``tokens`` are the output so far; None where the workers append it themselves.
    """
    if step_id == 0:
        return introduce(0, SCORED, num_tokens=12)
    if step_id == 1:
        return introduce(1, GUIDED, BROKEN, PLAIN, going_on=(0, 12, 18))
    lengths = {0: 30, 1: 9, 3: 5}
    return plan(
        step_id,
        *((row, length + step_id - 2, 1) for row, length in lengths.items()),
        num_appended_tokens=[int(tokens is not None)] * 3,
        appended_token_ids=[] if tokens is None else [tokens[row][-1] for row in lengths],
        released_rows=[2] if step_id == 2 else [],
    )


def introduce(
    step_id: int, *new: NewSequence, num_tokens: int = 0, going_on: tuple[int, int, int] | None = None
) -> StepPlan:
    entries = [(int(one.row), 0, num_tokens or len(one.token_ids)) for one in new]
    blocks = [BLOCKS[one.row] for one in new]
    old = [going_on] if going_on is not None else []
    return plan(
        step_id,
        *old,
        *entries,
        samples=[True] * len(old) + [not num_tokens] * len(new),
        new_sequences=list(new),
        num_new_blocks=[0] * len(old) + [len(ids) for ids in blocks],
        new_block_ids=[block for ids in blocks for block in ids],
    )


def tokens_of(results: list[StepResult]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {0: [], 1: [], 3: []}
    for result in results[1:NUM_STEPS]:
        rows = [0, 1, 2, 3] if result.step_id == 1 else [0, 1, 3]
        for row, token_id in zip(rows, result.token_ids, strict=True):
            if row in found:
                found[row].append(token_id)
    return found


async def run(ranks: list[tuple[int, int]], *, workers_append: bool) -> list[StepResult]:
    async with FakeRegistry().serving() as registry, contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(spawned_worker(registry, *rank)) for rank in ranks]
        await join_all("random:tiny-llama", *workers, workers_append_tokens=workers_append)
        leaders = [worker.client for worker in workers if worker.claim.tp_rank == 0]
        control, results = leaders[0].execute(), leaders[-1].results()
        got: list[StepResult] = []
        if workers_append:  # far ahead of every token
            await control.send(*(next_plan(step_id, None) for step_id in range(NUM_STEPS)))
        while len(got) < NUM_STEPS:
            if not workers_append:
                await control.send(next_plan(len(got), tokens_of(got)))
            got.append(await results.next())
        # The output as a prompt: each token is as likely as it was told to be.
        whole = PROMPT + tokens_of(got)[0]
        again = replace(sequence(4, whole), num_prompt_logprobs=3)
        await control.send(introduce(NUM_STEPS, again))
        got.append(await results.next())
        assert await control.finish() == NUM_STEPS + 1
        return got


@pytest.fixture(scope="module")
def expected() -> list[StepResult]:
    return asyncio.run(run([(0, 0)], workers_append=False))


def test_log_probabilities_agree_in_every_piece(expected: list[StepResult]) -> None:
    first, second = expected[0].prompt_logprobs[0], expected[1].prompt_logprobs[0]
    again = expected[-1].prompt_logprobs[0]
    assert (first.first_position, len(first.tokens)) == (1, 12)
    assert (second.first_position, len(second.tokens)) == (13, 17)
    assert (again.first_position, len(again.tokens)) == (1, 30 + NUM_STEPS - 2)
    assert all(len(token.top) == 2 for token in first.tokens + second.tokens)
    output = [result.logprobs[0] for result in expected[1:-1]]
    assert all(len(token.top) == 3 for token in output)
    told = [*first.tokens, *second.tokens, *output]
    for token, other in zip(told, again.tokens, strict=False):
        assert_close(token, other)


def test_grammars_hold_and_fail_alone(expected: list[StepResult]) -> None:
    assert [result.invalid for result in expected] == [[], [2], *[[]] * (NUM_STEPS - 1)]
    guided = TOKENIZER.decode(tokens_of(expected)[1])
    assert re.fullmatch("[0-9a-f]{7}", guided)
    assert [set(result.logprobs) for result in expected] == [set(), *[{0}] * (NUM_STEPS - 1), set()]


@pytest.mark.parametrize(
    ("ranks", "workers_append"),
    [([(0, 0)], True), ([(0, 0), (0, 1)], True), ([(0, 0), (0, 1)], False), ([(0, 0), (1, 0)], False)],
    ids=["ahead", "ahead_two_ranks", "two_ranks", "two_stages"],
)
async def test_all_topologies_say_the_same(
    expected: list[StepResult], ranks: list[tuple[int, int]], *, workers_append: bool
) -> None:
    got = await run(ranks, workers_append=workers_append)
    for result, other in zip(got, expected, strict=True):
        assert (result.token_ids, result.invalid) == (other.token_ids, other.invalid)
        for place, logprobs in result.logprobs.items():
            assert_close(logprobs, other.logprobs[place])
        for place, piece in result.prompt_logprobs.items():
            assert_pieces_close(piece, other.prompt_logprobs[place])


def assert_pieces_close(piece: PromptLogprobs, other: PromptLogprobs) -> None:
    assert piece.first_position == other.first_position
    for token, other_token in zip(piece.tokens, other.tokens, strict=True):
        assert_close(token, other_token)


def assert_close(token: TokenLogprobs, other: TokenLogprobs) -> None:
    assert token.logprob == pytest.approx(other.logprob, abs=1e-3)
    for (_, logprob), (_, other_logprob) in zip(token.top, other.top, strict=False):
        assert logprob == pytest.approx(other_logprob, abs=1e-3)
