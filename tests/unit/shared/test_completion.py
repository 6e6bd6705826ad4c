from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.completion import Choice, Completion, collect, collect_async
from shared.errors import ProtocolError
from shared.generation import Delta, Finish, TokenLogprob, ToolCall, ToolCallDelta, Usage
from shared.messages import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

STOP = Finish(FinishReason.STOP, 3, 0.5, 1.5, 2.5, stop=2)
LENGTH = Finish(FinishReason.LENGTH, 2, 0.5, 1.5, 2.5)
USAGE = Usage(3, 5, 1)


def logprob(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, chr(token_id), bytes([token_id]), -0.5)


INTERLEAVED = (
    Delta(request_id="r1"),
    Delta("ab", (97, 98), choice=1, logprobs=(logprob(97), logprob(98))),
    Delta("c", (99,)),
    Delta("", (2,), STOP, choice=1, logprobs=(logprob(2),)),
    Delta("d", (100,), LENGTH),
    Delta(usage=USAGE),
)
JOINED = Completion(
    "r1",
    (
        Choice(0, "cd", (99, 100), LENGTH),
        Choice(1, "ab", (97, 98, 2), STOP, (logprob(97), logprob(98), logprob(2))),
    ),
    USAGE,
)


def test_choices_are_joined_each_for_itself() -> None:
    assert collect(INTERLEAVED) == JOINED
    assert JOINED.text == "cd"


async def test_so_they_are_with_asyncio() -> None:
    async def stream() -> AsyncIterator[Delta]:
        for delta in INTERLEAVED:
            yield delta

    assert await collect_async(stream()) == JOINED


def test_an_echoed_prompt_belongs_to_the_text() -> None:
    (choice,) = collect(
        [Delta("once", (1, 2), is_prompt=True, request_id="r"), Delta(" upon", (3,), LENGTH, usage=USAGE)]
    ).choices
    assert (choice.text, choice.token_ids, choice.num_echoed_tokens) == ("once upon", (1, 2, 3), 2)


def test_an_output_may_be_empty() -> None:
    (choice,) = collect([Delta(finish=LENGTH, request_id="r", usage=USAGE)]).choices
    assert (choice.text, choice.token_ids) == ("", ())


def test_tool_calls_are_joined_by_their_index() -> None:
    finish = Finish(FinishReason.TOOL_CALLS, 9, 0, 0, 0)
    (choice,) = collect(
        [
            Delta(tool_calls=(ToolCallDelta(0, "c0", "clock", '{"a"'),)),
            Delta(tool_calls=(ToolCallDelta(0, arguments=": 1}"), ToolCallDelta(1, "c1", "sun"))),
            Delta(tool_calls=(ToolCallDelta(1, arguments="{}"),)),
            Delta(finish=finish, usage=USAGE),
        ]
    ).choices
    assert choice.tool_calls == (ToolCall("c0", "clock", '{"a": 1}'), ToolCall("c1", "sun", "{}"))
    assert choice.finish is finish


@pytest.mark.parametrize(
    ("deltas", "said"),
    [
        ((), "before its last delta"),
        (INTERLEAVED[:1], "before its last delta"),
        (INTERLEAVED[:-1], "before its last delta"),
        ((*INTERLEAVED[:4], INTERLEAVED[5]), "before choice 0 did"),
        ((Delta(usage=USAGE),), "before its last delta"),
    ],
)
def test_what_ended_too_early_is_an_error(deltas: Iterable[Delta], said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        collect(deltas)


@given(st.lists(st.tuples(st.integers(0, 3), st.text(max_size=4), st.lists(st.integers(0, 9), max_size=3))))
def test_nothing_is_lost_and_nothing_mixed(parts: list[tuple[int, str, list[int]]]) -> None:
    deltas = [Delta(text, tuple(ids), choice=choice) for choice, text, ids in parts]
    ends = [Delta(finish=LENGTH, choice=choice) for choice in range(4)]
    completion = collect([*deltas, *ends, Delta(usage=USAGE)])
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    for choice in completion.choices:
        mine = [(text, ids) for index, text, ids in parts if index == choice.index]
        assert choice.text == "".join(text for text, _ in mine)
        assert list(choice.token_ids) == [token for _, ids in mine for token in ids]
