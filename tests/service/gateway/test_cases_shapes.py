"""Faults of other servers in what comes back: order of choices, log probabilities, usage, late failures, seeds."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import pytest

from shared.client import Delta, GenerateOptions, GenerateRequest
from shared.errors import InvalidRequestError, OrcaError, OverloadedError, UnavailableError
from shared.generation import Usage
from shared.messages import Cancel, FinishReason, SessionEvents, TokenLogprobs
from shared.status import StatusCode
from tests.fakes.fake_scheduler import ENGINE, FakeScheduler
from tests.fakes.forced_tokens import forced, logprobs_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from shared.messages import Submit
    from tests.service.gateway.conftest import RunningGateway, StartGateway

BOS, EOS = 257, 256


async def collect(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


def by_choice(deltas: Sequence[Delta]) -> dict[int, list[Delta]]:
    """The deltas of each choice; checks what holds for every stream."""
    first, *rest = deltas
    assert first.request_id
    assert [delta.usage for delta in rest[:-1]] == [None] * (len(rest) - 1)
    assert rest[-1].usage is not None
    assert not any(delta.request_id for delta in rest)
    found: dict[int, list[Delta]] = {}
    for delta in rest:
        found.setdefault(delta.choice, []).append(delta)
    for own in found.values():
        assert [delta.finish is not None for delta in own] == [False] * (len(own) - 1) + [True]
    return dict(sorted(found.items()))


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


# --- 14. Several prompts, several outputs -----------------------------------------------------------------------------


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("at_once", [1, 99])
async def test_choices_are_prompt_times_n_plus_sample(gateway: RunningGateway, as_ids: bool, at_once: int) -> None:
    texts = ["one", "two two two", "three"]
    prompts: list[Any] = [[*text.encode()] if as_ids else text for text in texts]
    request = GenerateRequest(prompts, GenerateOptions(max_tokens=9, n=2, seed=5), echo=True)
    seen: list[Submit] = []

    def output(submit: Submit) -> list[int]:
        seen.append(submit)
        return [*str(len(seen)).encode(), *b"abcdefgh"[len(seen) :], EOS]  # the last ones end first

    async with forced(gateway.session, output, at_once=at_once) as submits:
        deltas = await collect(gateway.client.generate(request))
    choices = by_choice(deltas)
    assert list(choices) == list(range(6))
    for index, own in choices.items():
        text = texts[index // 2]
        submit = submits[index]
        assert submit.prompt_token_ids.tolist() == ([] if as_ids else [BOS]) + [*text.encode()]
        assert own[0].is_prompt
        assert (own[0].text, list(own[0].token_ids)) == (text, submit.prompt_token_ids.tolist())
        assert text_of(own[1:]) == f"{index + 1}{'abcdefgh'[index + 1 :]}"
        assert not any(delta.is_prompt for delta in own[1:])
    seeds = [submit.sampling.seed for submit in submits]
    assert seeds == [5, seeds[1]] * 3
    assert seeds[1] != 5
    num_prompt = sum(len(submit.prompt_token_ids) for submit in submits[::2])
    assert deltas[-1].usage == Usage(num_prompt, sum(1 + 8 - number + 1 for number in range(1, 7)))


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (["a", [1] * 64, "b"], {}, r"prompts\[1\] has 64 tokens"),
        (["a", "b", [300]], {}, r"prompts\[2\]\[0\] is 300"),
        (["a"] * 300, {}, "there are 300 prompts; at most 128 choices"),
        (["a"] * 3, {"n": 43}, r"prompts \(3\) times n \(43\) are 129 choices; at most 128"),
        (["a"], {"n": 9}, r"asks for 9 choices; the gateway serves 8 at once"),
    ],
)
async def test_one_bad_prompt_fails_the_request_before_anything_streams(
    gateway: RunningGateway, prompts: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        await anext(gateway.client.generate(GenerateRequest(prompts, GenerateOptions(**options))))
    assert gateway.session.submits.empty()
    assert (await gateway.client.status()).num_gateway_requests == 0


async def test_every_choice_takes_a_place(gateway: RunningGateway) -> None:
    deltas = gateway.client.generate(GenerateRequest(["a", "b"], GenerateOptions(n=3)))
    await anext(deltas)
    with pytest.raises(OverloadedError):
        await anext(gateway.client.generate("c", GenerateOptions(n=3)))
    other = gateway.client.generate("c", GenerateOptions(n=2))
    await anext(other)
    await other.aclose()
    await deltas.aclose()
    cancelled = {await gateway.session.cancelled() for _ in range(8)}
    assert len(cancelled) == 8, "giving up the iterator cancels all"


async def test_deltas_of_choices_are_merged_as_they_come(gateway: RunningGateway) -> None:
    deltas = gateway.client.generate("a", GenerateOptions(n=2))
    await anext(deltas)
    one, two = [await gateway.session.submitted() for _ in range(2)]
    for submit, index, text in ((two, 1, "x"), (one, 0, "y"), (two, 1, "z")):
        gateway.session.tokens(submit.handle, ord(text))
        assert await anext(deltas) == Delta(text, (ord(text),), choice=index)
    gateway.session.end(two.handle, FinishReason.LENGTH)
    ended = await anext(deltas)
    assert (ended.choice, ended.finish is not None, ended.usage) == (1, True, None)
    gateway.session.end(one.handle, FinishReason.LENGTH)
    (last,) = await collect(deltas)
    assert last.usage == Usage(2, 3)


async def test_best_of_gives_the_most_likely_ones_best_first(gateway: RunningGateway) -> None:
    # By mean log probability: id % 8 tells. "h" is the likeliest, then "a", "b" ... "g".
    outputs = [b"ccc", b"aag", b"hg", b"bbbb", b"b", b"a", b"h", b"c"]
    async with forced(gateway.session, lambda submit: [*outputs[submit.handle - 1], EOS], at_once=2) as submits:
        request = GenerateRequest(["one", "two"], GenerateOptions(n=2, best_of=4, temperature=0.5, seed=3))
        deltas = await collect(gateway.client.generate(request))
    assert [submit.sampling.num_logprobs for submit in submits] == [0] * 8
    choices = by_choice(deltas)
    means = [[_mean(output) for output in outputs[:4]], [_mean(output) for output in outputs[4:]]]
    expected = []
    for prompt in range(2):
        ranked = sorted(range(4), key=lambda sample: -means[prompt][sample])[:2]
        expected += [outputs[4 * prompt + sample].decode() for sample in ranked]
    assert [text_of(own) for own in choices.values()] == expected
    assert list(choices) == [0, 1, 2, 3]
    assert all(delta.logprobs == () for delta in deltas), "they were not asked for"
    assert deltas[-1].usage == Usage(8, sum(map(len, outputs)) + len(outputs)), "what is dropped was generated, too"


def _mean(output: bytes) -> float:
    logprobs = [logprobs_of(token_id, 0).logprob for token_id in [*output, EOS]]
    return sum(logprobs) / len(logprobs)


async def test_best_of_with_echo_and_log_probabilities_keeps_both(gateway: RunningGateway) -> None:
    outputs = [b"c", b"h"]
    async with forced(gateway.session, lambda submit: [*outputs[submit.handle - 1], EOS]):
        options = GenerateOptions(best_of=2, num_logprobs=1)
        deltas = await collect(gateway.client.generate(GenerateRequest(["ab"], options, echo=True)))
    ((prompt, output),) = by_choice(deltas).values()
    assert prompt.is_prompt
    assert (prompt.text, len(prompt.logprobs)) == ("ab", 3)
    assert (output.text, [entry.token_id for entry in output.logprobs]) == ("h", [ord("h"), EOS])


# --- 16. Log probabilities --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 3, 99])
@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize(
    ("output", "stops", "text"),
    [
        ([*"a👩\u200d🚀é字b".encode(), EOS], (), "a👩\u200d🚀é字b"),
        ([*b"red green blue", EOS], ("n bl",), "red gree"),
        ([*b"hey!!", EOS], ("!!!",), "hey!!"),
        ([*b"\xf0\x9fab"], (), "\ufffdab"),
        ([*b"ab\xf0\x9f"], (), "ab\ufffd"),
    ],
)
async def test_every_token_has_one_entry_beside_its_text(
    gateway: RunningGateway, at_once: int, num_top: int, output: list[int], stops: tuple[str, ...], text: str
) -> None:
    options = GenerateOptions(max_tokens=len(output), stop=stops, n=2, num_logprobs=num_top)
    async with forced(gateway.session, lambda _: output, at_once=at_once):
        deltas = await collect(gateway.client.generate("a", options))
    for own in by_choice(deltas).values():
        shown = b""
        for delta in own:
            assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)
            shown += b"".join(entry.token_bytes for entry in delta.logprobs)
        entries = [entry for delta in own for entry in delta.logprobs]
        assert text_of(own) == text == shown.decode(errors="replace")
        assert [entry.token_id for entry in entries] == output[: len(entries)]
        for entry in entries:
            expected = logprobs_of(entry.token_id, num_top)
            assert entry.logprob == expected.logprob, "the chosen one is there even outside the most likely ones"
            assert [(other.token_id, other.logprob) for other in entry.top] == list(expected.top)
            assert [other.token_bytes for other in entry.top] == [bytes([other]) for other, _ in expected.top]
        if output[-1] == EOS and not stops:
            assert (entries[-1].token, entries[-1].token_bytes) == ("<|eos|>", b"")


async def test_without_being_asked_for_there_are_none(gateway: RunningGateway) -> None:
    async with forced(gateway.session, lambda _: [*b"ab", EOS]) as submits:
        deltas = await collect(gateway.client.generate(GenerateRequest(["a"], echo=True)))
    assert all(delta.logprobs == () for delta in deltas)
    assert (submits[0].sampling.num_logprobs, submits[0].num_prompt_logprobs) == (None, None)


async def test_an_echoed_prompt_waits_for_its_log_probabilities(gateway: RunningGateway) -> None:
    deltas = gateway.client.generate(GenerateRequest(["ab"], GenerateOptions(num_logprobs=0), echo=True))
    await anext(deltas)
    submit = await gateway.session.submitted()
    scores = [TokenLogprobs(-1.0), TokenLogprobs(-2.0)]
    gateway.session.prompt_logprobs(submit.handle, 1, scores[0])
    gateway.session.drop()
    again = await (await gateway.reconnected()).submitted()
    assert again == submit, "half of a prompt's is none"
    gateway.session.prompt_logprobs(again.handle, 1, *scores)
    gateway.session.tokens(again.handle, *b"x", logprobs=[TokenLogprobs(-0.5)])
    prompt, output = await anext(deltas), await anext(deltas)
    assert prompt.is_prompt
    assert (prompt.text, prompt.token_ids) == ("ab", (BOS, *b"ab"))
    assert [entry.logprob for entry in prompt.logprobs] == [None, -1.0, -2.0]
    assert (output.text, [entry.logprob for entry in output.logprobs]) == ("x", [-0.5])
    gateway.session.drop()
    once_more = await (await gateway.reconnected()).submitted()
    assert once_more == dataclasses.replace(
        submit, num_prompt_logprobs=None, output_token_ids=once_more.output_token_ids
    )
    gateway.session.end(once_more.handle, FinishReason.LENGTH)
    (last,) = await collect(deltas)
    assert last.text == ""


async def test_a_long_scored_prompt_comes_in_pieces(start_gateway: StartGateway) -> None:
    engine = dataclasses.replace(ENGINE, max_model_len=2000, num_slots=4000)
    async with start_gateway(scheduler=FakeScheduler(engine=engine)) as gateway:
        await gateway.health(serving=True)
        text = "é" * 500
        options = GenerateOptions(max_tokens=2, num_logprobs=20)
        async with forced(gateway.session, lambda _: b"ab"):
            deltas = await collect(gateway.client.generate(GenerateRequest([text], options, echo=True)))
    (own,) = by_choice(deltas).values()
    prompt = [delta for delta in own if delta.is_prompt]
    assert len(prompt) > 1
    assert max(len(delta.logprobs) for delta in prompt) * 21 <= 4096
    assert text_of(prompt) == text
    entries = [entry for delta in prompt for entry in delta.logprobs]
    assert [entry.token_id for entry in entries] == [BOS, *text.encode()]
    assert b"".join(entry.token_bytes for entry in entries).decode() == text
    assert text_of(own[len(prompt) :]) == "ab"


# --- 17. Infinite log probabilities -----------------------------------------------------------------------------------


async def test_what_the_engine_could_not_compute_is_an_error(gateway: RunningGateway) -> None:
    deltas = gateway.client.generate("a", GenerateOptions(num_logprobs=5))
    await anext(deltas)
    submit = await gateway.session.submitted()
    gateway.session.tokens(submit.handle, 97, logprobs=[TokenLogprobs(-9999.0, ((1, -9999.0),))])
    delta = await anext(deltas)
    assert all(math.isfinite(entry.logprob or 0) for entry in delta.logprobs)
    gateway.session.end(submit.handle, FinishReason.ERROR, error_code=StatusCode.INTERNAL, error_message="not finite")
    with pytest.raises(OrcaError, match="not finite"):
        await anext(deltas)


async def test_a_token_without_its_log_probability_ends_the_session(gateway: RunningGateway) -> None:
    deltas = gateway.client.generate("a", GenerateOptions(num_logprobs=0, max_tokens=1))
    await anext(deltas)
    submit = await gateway.session.submitted()
    gateway.session.send(SessionEvents([submit.handle], [97]))
    again = await (await gateway.reconnected()).submitted()
    assert again == submit
    gateway.session.end(again.handle, FinishReason.LENGTH, 98, logprobs=[TokenLogprobs(-1.0)])
    (last,) = await collect(deltas)
    assert (last.text, [entry.logprob for entry in last.logprobs]) == ("b", [-1.0])


# --- 19. Usage --------------------------------------------------------------------------------------------------------


async def test_cached_tokens_of_a_prompt_count_once(gateway: RunningGateway) -> None:
    deltas = asyncio.create_task(collect(gateway.client.generate(GenerateRequest(["abc", "d"], GenerateOptions(n=2)))))
    submits = [await gateway.session.submitted() for _ in range(4)]
    for submit, cached in zip(submits, (2, 4, 0, 2), strict=True):
        gateway.session.end(
            submit.handle, FinishReason.LENGTH, *b"xy", num_cached_tokens=cached, num_preemptions=cached
        )
    got = await deltas
    assert got[-1].usage == Usage(num_prompt_tokens=6, num_output_tokens=8, num_cached_tokens=2)
    finishes = [own[-1].finish for own in by_choice(got).values()]
    assert [finish and (finish.num_cached_tokens, finish.num_preemptions) for finish in finishes] == [
        (2, 2),
        (4, 4),
        (0, 0),
        (2, 2),
    ]


# --- 21. Failures after the stream began ------------------------------------------------------------------------------


async def test_if_one_choice_fails_the_request_does_and_the_others_are_cancelled(gateway: RunningGateway) -> None:
    deltas = gateway.client.generate(GenerateRequest(["a", "b"], GenerateOptions(n=2)))
    await anext(deltas)
    submits = [await gateway.session.submitted() for _ in range(4)]
    gateway.session.end(submits[1].handle, FinishReason.LENGTH, *b"x")
    ended = await anext(deltas)
    assert (ended.choice, ended.finish is not None) == (1, True)
    gateway.session.end(
        submits[2].handle, FinishReason.ERROR, error_code=StatusCode.UNAVAILABLE, error_message="it broke"
    )
    with pytest.raises(UnavailableError, match="it broke"):
        await anext(deltas)
    cancelled = [await gateway.session.cancelled() for _ in range(2)]
    assert cancelled == [submits[0].handle, submits[3].handle]
    assert gateway.session.cancels.empty()


@pytest.mark.parametrize("best_of", [2, 3])
async def test_a_scheduler_that_goes_for_good_is_no_end(start_gateway: StartGateway, best_of: int) -> None:
    async with start_gateway(grace_s=0) as gateway:
        await gateway.health(serving=True)
        deltas = gateway.client.generate("a", GenerateOptions(n=2, best_of=best_of))
        await anext(deltas)
        submit = await gateway.session.submitted()
        scores = [] if best_of == 2 else [TokenLogprobs(-1.0)] * 5
        gateway.session.tokens(submit.handle, *b"hello", logprobs=scores)
        if best_of == 2:
            assert (await anext(deltas)).text == "hello"
        await gateway.scheduler.stop()
        await gateway.health(serving=False)
        gateway.shutdown.request("SIGTERM")
        with pytest.raises(UnavailableError, match="shutting down"):
            await collect(deltas)
        await gateway.scheduler.start()


async def test_a_refusal_of_the_scheduler_fails_all_choices(gateway: RunningGateway) -> None:
    deltas = gateway.client.generate("a", GenerateOptions(n=3))
    await anext(deltas)
    submits = [await gateway.session.submitted() for _ in range(3)]
    for submit in submits:
        gateway.session.end(
            submit.handle, FinishReason.ERROR, error_code=StatusCode.RESOURCE_EXHAUSTED, error_message="full"
        )
    with pytest.raises(OverloadedError, match="full"):
        await collect(deltas)
    leftover: list[Cancel] = []
    while not gateway.session.cancels.empty():
        leftover.append(gateway.session.cancels.get_nowait())
    assert {cancel.handle for cancel in leftover} <= {submit.handle for submit in submits}


# --- 24. Seeds --------------------------------------------------------------------------------------------------------


async def test_a_choice_depends_on_seed_and_sample_alone(gateway: RunningGateway) -> None:
    async with forced(gateway.session, lambda submit: [97 + submit.sampling.seed % 26] * 4) as submits:
        options = GenerateOptions(max_tokens=4, seed=11)
        alone = by_choice(await collect(gateway.client.generate("a", options)))
        several = by_choice(await collect(gateway.client.generate("a", dataclasses.replace(options, n=4))))
        among = by_choice(
            await collect(gateway.client.generate(GenerateRequest(["b", "a"], dataclasses.replace(options, n=4))))
        )
    texts = [text_of(own) for own in several.values()]
    assert text_of(alone[0]) == texts[0]
    assert [text_of(own) for own in among.values()] == texts * 2
    assert len({submit.sampling.seed for submit in submits}) == 4
