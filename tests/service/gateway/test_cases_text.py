"""Faults of other servers in how text comes out: characters, stop strings and ends cut anywhere."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from services.gateway.served_model import load_model_text
from shared.client import Delta, Finish, GenerateOptions, GenerateRequest
from shared.errors import OrcaError, UnavailableError
from shared.messages import FinishReason
from shared.status import StatusCode
from shared.text.byte_tokenizer import ByteTokenizer
from tests.fakes.forced_tokens import forced

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.gateway.served_model import ModelText
    from tests.service.gateway.conftest import RunningGateway, StartGateway

BOS, EOS, END_OF_TURN = 257, 256, 258
HARD = "a👩\u200d🚀é字b"
AT_ONCE = pytest.mark.parametrize("at_once", [1, 2, 5, 99])


async def collect(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def ids_of(deltas: list[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def finish_of(deltas: list[Delta]) -> Finish:
    assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    finish = deltas[-1].finish
    assert finish is not None
    return finish


# --- 1. A character split over tokens ---------------------------------------------------------------------------------


@AT_ONCE
async def test_a_character_over_several_tokens_is_never_cut(gateway: RunningGateway, at_once: int) -> None:
    data = HARD.encode()
    async with forced(gateway.session, lambda submit: data[submit.prompt_token_ids[0] :], at_once=at_once):
        for size in range(1, len(data) + 1):
            options = GenerateOptions(max_tokens=size)
            whole, rest = await asyncio.gather(
                collect(gateway.client.generate([0], options)),
                collect(gateway.client.generate([1], GenerateOptions(max_tokens=len(data) - 1))),
            )
            expected = data[:size].decode(errors="replace")
            assert text_of(whole) == expected
            assert ids_of(whole) == list(data[:size])
            assert finish_of(whole).reason is FinishReason.LENGTH
            assert "\ufffd" not in text_of(whole[:-1]), "an unfinished character shows at the end only"
            assert expected.startswith(text_of(whole[:-1]))
            assert text_of(rest) == HARD[1:]


async def test_bytes_that_never_make_a_character_are_not_held_back(gateway: RunningGateway) -> None:
    deltas = gateway.client.generate("a")
    await anext(deltas)
    submit = await gateway.session.submitted()
    gateway.session.tokens(submit.handle, 0xFF, 0xFE)
    assert await anext(deltas) == Delta("\ufffd\ufffd", (0xFF, 0xFE))
    await deltas.aclose()


# --- 3. Stop strings --------------------------------------------------------------------------------------------------


@AT_ONCE
@pytest.mark.parametrize(
    ("output", "stops", "text", "stop"),
    [
        ("red green blue", ["n bl"], "red gree", "n bl"),
        ("red green blue", ["n bl", "een b"], "red gr", "een b"),
        ("xabcabc", ["ab", "abc"], "x", "ab"),
        ("xabcabc", ["abc", "bc"], "x", "abc"),
        ("hi 👩 there", ["👩"], "hi ", "👩"),
        ("héé", ["é"], "h", "é"),
        ("no stop", ["stopp", "nos"], "no stop", None),
    ],
)
async def test_nothing_of_a_stop_string_is_shown(
    gateway: RunningGateway, at_once: int, output: str, stops: list[str], text: str, stop: str | None
) -> None:
    options = GenerateOptions(max_tokens=40, stop=tuple(stops))
    async with forced(gateway.session, lambda _: [*output.encode(), EOS], at_once=at_once):
        deltas = await collect(gateway.client.generate("a", options))
    assert text_of(deltas) == text
    finish = finish_of(deltas)
    assert finish.reason is FinishReason.STOP
    assert finish.stop == (EOS if stop is None else stop)
    shown = ids_of(deltas)
    expected = [*output.encode(), EOS] if stop is None else list((text + stop).encode())
    assert shown == expected, "the tokens of the stop string are output, too; those after it are not"
    assert finish.num_output_tokens == len(expected)
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.num_output_tokens == len(expected)


async def test_a_stop_string_cancels_at_once_and_the_scheduler_tells_where_the_time_went(
    gateway: RunningGateway,
) -> None:
    gateway.session.cancelled_fields = {"queue_ns": 5, "prefill_ns": 7 * 10**6, "decode_ns": 9, "num_cached_tokens": 2}
    deltas = gateway.client.generate("a", GenerateOptions(stop=("!",)))
    await anext(deltas)
    submit = await gateway.session.submitted()
    gateway.session.tokens(submit.handle, *b"hey!you")
    rest = await collect(deltas)
    assert await gateway.session.cancelled() == submit.handle
    assert text_of(rest) == "hey"
    finish = finish_of(rest)
    assert (finish.prefill_ms, finish.num_cached_tokens, finish.num_output_tokens) == (7.0, 2, 4)
    assert rest[-1].usage is not None
    assert rest[-1].usage.num_cached_tokens == 2
    assert gateway.session.cancels.empty()
    assert (await gateway.client.status()).num_gateway_requests == 0


@pytest.mark.parametrize("how", ["silent", "lost"])
async def test_a_scheduler_that_does_not_answer_holds_up_no_end(gateway: RunningGateway, how: str) -> None:
    gateway.session.answers_cancels = False
    deltas = gateway.client.generate("a", GenerateOptions(stop=("!",)))
    await anext(deltas)
    submit = await gateway.session.submitted()
    gateway.session.tokens(submit.handle, *b"hey!")
    ending = asyncio.create_task(collect(deltas))
    await gateway.session.cancelled()
    if how == "lost":
        gateway.session.drop()
        session = await gateway.reconnected()
        await gateway.health(serving=True)
        assert session.submits.empty(), "its output is complete"
    rest = await ending
    assert text_of(rest) == "hey"
    assert finish_of(rest).stop == "!"


async def test_only_what_may_become_a_stop_string_is_held_back(gateway: RunningGateway) -> None:
    deltas = gateway.client.generate("a", GenerateOptions(stop=("abcd", "!")))
    await anext(deltas)
    submit = await gateway.session.submitted()
    gateway.session.tokens(submit.handle, *b"xabc")
    assert await anext(deltas) == Delta("x", (ord("x"),))
    gateway.session.tokens(submit.handle, *b"ab")
    assert (await anext(deltas)).text == "abc"
    gateway.session.tokens(submit.handle, *b"x")
    assert (await anext(deltas)).text == "abx"
    await deltas.aclose()


async def test_a_stop_string_does_not_begin_in_the_prompt(gateway: RunningGateway) -> None:
    options = GenerateOptions(max_tokens=3, stop=("ab",))
    async with forced(gateway.session, lambda _: b"bab"):
        for echo in (False, True):
            deltas = await collect(gateway.client.generate(GenerateRequest(["a"], options, echo=echo)))
            output = [delta for delta in deltas if not delta.is_prompt]
            assert text_of(output) == "b"
            assert finish_of(output).stop == "ab"


# --- 4. Text that is held back when the output ends in another way ----------------------------------------------------


@AT_ONCE
@pytest.mark.parametrize("ending", [FinishReason.STOP, FinishReason.LENGTH])
async def test_text_that_is_held_back_comes_out_at_the_end(
    gateway: RunningGateway, at_once: int, ending: FinishReason
) -> None:
    output = [*b"hey!!", *([EOS] if ending is FinishReason.STOP else [])]
    options = GenerateOptions(max_tokens=len(b"hey!!") + (ending is FinishReason.STOP), stop=("!!!",))
    async with forced(gateway.session, lambda _: output, at_once=at_once):
        deltas = await collect(gateway.client.generate("a", options))
    assert text_of(deltas) == "hey!!"
    assert ids_of(deltas) == output
    finish = finish_of(deltas)
    assert (finish.reason, finish.stop) == (ending, EOS if ending is FinishReason.STOP else None)


async def test_text_that_is_held_back_is_gone_with_a_cancelled_request(gateway: RunningGateway) -> None:
    deltas = gateway.client.generate("a", GenerateOptions(stop=("!!!",)))
    await anext(deltas)
    submit = await gateway.session.submitted()
    gateway.session.tokens(submit.handle, *b"hey!!")
    assert (await anext(deltas)).text == "hey"
    await deltas.aclose()
    assert await gateway.session.cancelled() == submit.handle


@pytest.mark.parametrize(
    ("reason", "code"), [(FinishReason.ERROR, StatusCode.UNAVAILABLE), (FinishReason.CANCELLED, StatusCode.CANCELLED)]
)
async def test_a_failure_is_never_an_end(gateway: RunningGateway, reason: FinishReason, code: StatusCode) -> None:
    deltas = gateway.client.generate("a", GenerateOptions(stop=("!!!",)))
    await anext(deltas)
    submit = await gateway.session.submitted()
    fields: dict[str, Any] = {"error_code": StatusCode.UNAVAILABLE, "error_message": "a worker is gone"}
    gateway.session.end(submit.handle, reason, *b"hey!!", **(fields if reason is FinishReason.ERROR else {}))
    got: list[Delta] = []

    async def read() -> None:
        async for delta in deltas:
            got.append(delta)  # noqa: PERF401 - what came before the failure counts, too

    with pytest.raises(OrcaError) as caught:
        await read()
    assert caught.value.code is code
    assert isinstance(caught.value, UnavailableError) is (code is StatusCode.UNAVAILABLE)
    assert "!" not in text_of(got)
    assert all(delta.finish is None for delta in got)


# --- 5. End-of-turn tokens --------------------------------------------------------------------------------------------


class TwoEnds(ByteTokenizer):
    eos_token_ids = frozenset({EOS, END_OF_TURN})

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == END_OF_TURN else super().token_bytes(token_id)


def load_two_ends(name: str) -> ModelText:
    text = load_model_text(name)
    return type(text)(TwoEnds(300), *(getattr(text, field) for field in list(text.__slots__)[1:]))


@pytest.mark.parametrize(
    ("options", "output", "ids", "stop"),
    [
        ({}, [*b"hello", END_OF_TURN, *b"more"], [*b"hello", END_OF_TURN], END_OF_TURN),
        ({}, [*b"hello", EOS], [*b"hello", EOS], EOS),
        ({"ignore_eos": True}, [*b"he", END_OF_TURN, EOS, *b"llo"], [*b"he", END_OF_TURN, EOS, *b"llo"], None),
        (
            {"ignore_eos": True, "stop_token_ids": (9,)},
            [*b"he", END_OF_TURN, 9, *b"llo"],
            [*b"he", END_OF_TURN, 9],
            9,
        ),
        ({"stop_token_ids": (9,)}, [*b"he", END_OF_TURN], [*b"he", END_OF_TURN], END_OF_TURN),
        (
            {"min_tokens": 6, "stop_token_ids": (9,)},
            [*b"hel", END_OF_TURN, 9, *b"lo!", 9],
            [*b"hello!", 9],
            9,
        ),
        ({"min_tokens": 3, "stop": ("l",)}, [*b"hello"], [*b"hel"], "l"),
        ({"min_tokens": 4, "stop": ("el", "lo")}, [*b"hello"], [*b"hello"], "lo"),
    ],
)
@AT_ONCE
async def test_every_way_to_end_is_told_and_its_token_is_not_text(
    start_gateway: StartGateway,
    options: dict[str, Any],
    output: list[int],
    ids: list[int],
    stop: object,
    at_once: int,
) -> None:
    async with start_gateway(load=load_two_ends) as gateway:
        await gateway.health(serving=True)
        wanted = GenerateOptions(**{"max_tokens": len(output), **options})
        async with forced(gateway.session, lambda _: output, at_once=at_once) as submits:
            deltas = await collect(gateway.client.generate("a", wanted))
    finish = finish_of(deltas)
    assert ids_of(deltas) == ids
    assert finish.stop == stop
    assert finish.reason is (FinishReason.LENGTH if stop is None else FinishReason.STOP)
    assert finish.num_output_tokens == len(ids), "the token that stopped it counts"
    shown = ids[:-1] if isinstance(stop, int) else ids
    text = bytes(token_id for token_id in shown if token_id < 256).decode()
    assert text_of(deltas) == (text.removesuffix(stop) if isinstance(stop, str) else text)
    eos = set() if options.get("ignore_eos") else {EOS, END_OF_TURN}
    assert submits[0].stop_token_ids == eos | set(options.get("stop_token_ids", ()))
