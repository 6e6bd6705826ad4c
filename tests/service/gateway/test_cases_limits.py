"""Faults of other servers at the limits: lengths, empty prompts, ids outside the vocabulary, extreme numbers.

Each request comes while another one is being served, which must not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from shared.client import ChatMessage, Delta, GenerateOptions, GenerateRequest
from shared.errors import InvalidRequestError
from shared.messages import FinishReason
from shared.pb import common_pb2, gateway_pb2, gateway_pb2_grpc
from shared.rpc import connect
from tests.fakes.fake_scheduler import ENGINE
from tests.fakes.forced_tokens import forced, logprobs_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from shared.messages import Submit
    from tests.service.gateway.conftest import RunningGateway

BOS, EOS = 257, 256
INF, NAN = float("inf"), float("nan")


async def collect(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def endless(submit: Submit) -> list[int]:
    return [ord("a") + index % 26 for index in range(submit.max_tokens)]


@contextlib.asynccontextmanager
async def neighbour(gateway: RunningGateway) -> AsyncIterator[None]:
    """Somebody else's request, which ends as if it were alone."""
    deltas = gateway.client.generate("n", request_id="neighbour")
    await anext(deltas)
    submit = await gateway.session.submitted()
    gateway.session.tokens(submit.handle, *b"so ")
    assert (await anext(deltas)).text == "so "
    yield
    gateway.session.end(submit.handle, FinishReason.LENGTH, *b"far")
    (last,) = await collect(deltas)
    assert last.text == "far"


# --- 7. max_tokens 0 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["ab", "", "a longer prompt"])
@pytest.mark.parametrize("num_logprobs", [None, 0, 2])
async def test_zero_tokens_with_echo_only_score_the_prompt(
    gateway: RunningGateway, num_logprobs: int | None, text: str
) -> None:
    options = GenerateOptions(max_tokens=0, num_logprobs=num_logprobs)
    ids = [BOS, *text.encode()]
    async with neighbour(gateway), forced(gateway.session, lambda _: []) as submits:
        first, *prompt, last = await collect(gateway.client.generate(GenerateRequest([text], options, echo=True)))
    assert first.request_id
    (echo,) = prompt
    assert (echo.text, echo.token_ids, echo.is_prompt) == (text, tuple(ids), True)
    assert (last.text, last.token_ids, last.logprobs, last.is_prompt) == ("", (), (), False)
    assert last.finish is not None
    assert (last.finish.reason, last.finish.num_output_tokens, last.finish.stop) == (FinishReason.LENGTH, 0, None)
    assert last.usage is not None
    assert (last.usage.num_prompt_tokens, last.usage.num_output_tokens) == (len(ids), 0)
    if num_logprobs is None:
        assert echo.logprobs == ()
    else:
        assert [entry.token_id for entry in echo.logprobs] == ids
        expected = [None, *(logprobs_of(token_id, num_logprobs).logprob for token_id in ids[1:])]
        assert [entry.logprob for entry in echo.logprobs] == expected
        assert [len(entry.top) for entry in echo.logprobs] == [0, *[num_logprobs] * (len(ids) - 1)]
    needs_engine = num_logprobs is not None and len(ids) > 1
    assert [(submit.max_tokens, submit.num_prompt_logprobs) for submit in submits] == [(0, num_logprobs)] * needs_engine


@pytest.mark.parametrize(
    ("max_tokens", "echo"), [(0, False), (-1, False), (-1, True), (-(2**31), False), (-(2**31), True)]
)
async def test_fewer_tokens_than_none_are_refused(gateway: RunningGateway, max_tokens: int, echo: bool) -> None:
    request = GenerateRequest(["a"], GenerateOptions(max_tokens=max_tokens, num_logprobs=1), echo=echo)
    async with neighbour(gateway):
        with pytest.raises(InvalidRequestError, match=f"max_tokens is {max_tokens}; it must be at least 1"):
            await collect(gateway.client.generate(request))


# --- 8. A missing max_tokens ------------------------------------------------------------------------------------------


async def test_without_a_limit_a_prompt_has_16_tokens_and_a_conversation_the_context(gateway: RunningGateway) -> None:
    async with forced(gateway.session, endless):
        completion = await collect(gateway.client.generate("a"))
        answer = await collect(gateway.client.chat([ChatMessage("user", "hi")]))
    num_prompt = 1 + len("user: hi\nassistant: ")
    for deltas, num_tokens in ((completion, 16), (answer, min(ENGINE.num_slots, ENGINE.max_model_len) - num_prompt)):
        finish = deltas[-1].finish
        assert finish is not None
        assert (finish.reason, finish.num_output_tokens) == (FinishReason.LENGTH, num_tokens)


# --- 9. More than the context has left --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "message"),
    [
        (47, 1, None),
        (46, 2, None),
        (1, 47, None),
        (47, 2, r"prompt \(47 tokens\) and max_tokens \(2\) add up to 49, over the engine's capacity of 48"),
        (
            60,
            10,
            r"prompt \(60 tokens\) and max_tokens \(10\) add up to 70, over the context of 64 .* most 4",
        ),
        (
            63,
            10,
            r"prompt \(63 tokens\) and max_tokens \(10\) add up to 73, over the context of 64 .* most 1",
        ),
        (64, 1, "the prompt has 64 tokens; with a context of 64 tokens it may have 63"),
        (65, 1, "the prompt has 65 tokens; with a context of 64 tokens it may have 63"),
        (
            1,
            64,
            r"prompt \(1 tokens\) and max_tokens \(64\) add up to 65, over the context of 64 .* most 63",
        ),
    ],
)
async def test_nothing_is_clamped(
    gateway: RunningGateway, num_prompt: int, max_tokens: int, message: str | None
) -> None:
    options = GenerateOptions(max_tokens=max_tokens)
    async with neighbour(gateway), forced(gateway.session, endless) as submits:
        if message is not None:
            with pytest.raises(InvalidRequestError, match=message):
                await collect(gateway.client.generate([1] * num_prompt, options))
            assert submits == []
        else:
            *_, last = await collect(gateway.client.generate([1] * num_prompt, options))
            assert last.finish is not None
            assert last.finish.num_output_tokens == max_tokens


# --- 11. Empty prompts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts is empty"),
        ([[]], "the prompt has no tokens"),
        (["a", []], r"prompts\[1\] has no tokens"),
    ],
)
async def test_empty_prompts_are_refused(gateway: RunningGateway, prompts: list[Any], message: str) -> None:
    async with neighbour(gateway):
        with pytest.raises(InvalidRequestError, match=message):
            await collect(gateway.client.generate(GenerateRequest(prompts)))
    assert gateway.session.submits.empty()


async def test_an_empty_text_is_the_begin_token_alone(gateway: RunningGateway) -> None:
    async with forced(gateway.session, endless) as submits:
        deltas = await collect(gateway.client.generate(GenerateRequest(["", "a"], GenerateOptions(max_tokens=2))))
    assert sorted(submit.prompt_token_ids.tolist() for submit in submits) == [[257], [257, 97]]
    assert text_of(deltas) == "abab"


@pytest.mark.parametrize(
    ("messages", "message"),
    [([], "messages is empty"), ([ChatMessage("", "a")], r"messages\[0\].role is empty")],
)
async def test_empty_conversations_are_refused(
    gateway: RunningGateway, messages: list[ChatMessage], message: str
) -> None:
    async with neighbour(gateway):
        with pytest.raises(InvalidRequestError, match=message):
            await collect(gateway.client.chat(messages))


@pytest.mark.parametrize("content", ["", "  \n"])
async def test_a_turn_may_be_empty(gateway: RunningGateway, content: str) -> None:
    async with forced(gateway.session, lambda _: [*b"yes", EOS]):
        assert text_of(await collect(gateway.client.chat([ChatMessage("user", content)]))) == "yes"


# --- 12. Ids outside the vocabulary -----------------------------------------------------------------------------------


@pytest.mark.parametrize("token_id", [ENGINE.vocab_size, 2**32 - 1])
@pytest.mark.parametrize("field", ["prompt", "prompts", "logit_bias", "stop_token_ids"])
async def test_ids_outside_the_vocabulary_are_refused(gateway: RunningGateway, field: str, token_id: int) -> None:
    requests: dict[str, tuple[list[Any], GenerateOptions, str]] = {
        "prompt": ([[1, token_id]], GenerateOptions(), r"prompt\[1\] is"),
        "prompts": (["a", [token_id]], GenerateOptions(), r"prompts\[1\]\[0\] is"),
        "logit_bias": (["a"], GenerateOptions(logit_bias={1: 1.0, token_id: 1.0}), "logit_bias is for token id"),
        "stop_token_ids": (["a"], GenerateOptions(stop_token_ids=(token_id,)), r"stop_token_ids\[0\] is"),
    }
    prompts, options, message = requests[field]
    async with neighbour(gateway):
        with pytest.raises(InvalidRequestError, match=f"{message} {token_id}; .* from 0 to 299 only"):
            await collect(gateway.client.generate(GenerateRequest(prompts, options)))


async def test_the_last_id_of_the_vocabulary_is_one(gateway: RunningGateway) -> None:
    last = ENGINE.vocab_size - 1
    options = GenerateOptions(logit_bias={last: -100.0, 0: 100.0}, stop_token_ids=(last,))
    async with forced(gateway.session, lambda _: [last]) as submits:
        await collect(gateway.client.generate([last], options))
    assert submits[0].sampling.logit_bias == ((0, 100.0), (last, -100.0))


@pytest.mark.parametrize("bias", [101, -100.5, NAN, INF, 1e38])
async def test_biases_out_of_range_are_refused(gateway: RunningGateway, bias: float) -> None:
    async with neighbour(gateway):
        with pytest.raises(InvalidRequestError, match=r"logit_bias\[7\] is .*; it must be between -100 and 100"):
            await collect(gateway.client.generate("a", GenerateOptions(logit_bias={7: bias})))


async def test_a_violation_names_its_field_in_the_details(gateway: RunningGateway) -> None:
    options = gateway_pb2.GenerationOptions(sampling=common_pb2.SamplingParams(top_p=2))
    request = gateway_pb2.GenerateRequest(prompts=[gateway_pb2.Prompt(text="a")], options=options)
    async with connect(gateway.address) as channel:
        call = gateway_pb2_grpc.GatewayStub(channel).Generate(request)
        with pytest.raises(aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = dict(caught.value.trailing_metadata() or ())["grpc-status-details-bin"]
    assert isinstance(details, bytes)
    bad_request = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad_request) for detail in status_pb2.Status.FromString(details).details)
    assert [violation.field for violation in bad_request.field_violations] == ["top_p"]


# --- 22. Extreme sampling parameters ----------------------------------------------------------------------------------


TAKEN: dict[str, list[Any]] = {
    "temperature": [0.0, 1e-45, 1e-10, 1e-4, 1e-2, 2.0, 100.0],
    "top_p": [1e-9, 1.0],
    "top_k": [0, 1, ENGINE.vocab_size, ENGINE.vocab_size + 1],
    "min_p": [0.0, 1.0],
    "repetition_penalty": [1e-9, 10.0],
    "presence_penalty": [-2.0, 2.0],
    "frequency_penalty": [-2.0, 2.0],
    "num_logprobs": [0, 20],
    "seed": [0, 2**64 - 1],
}
REFUSED: dict[str, list[Any]] = {
    "temperature": [-1.0, 100.5, NAN, INF],
    "top_p": [0.0, 1.01, -1.0, NAN],
    "min_p": [-0.5, 1.5, NAN],
    "repetition_penalty": [0.0, -1.0, 10.5, NAN],
    "presence_penalty": [-2.5, 2.5, NAN],
    "frequency_penalty": [-2.5, 2.5, NAN],
    "num_logprobs": [21],
    "min_tokens": [17],
    "stop": [("",), ("a" * 1025,), tuple("abcdefghijklmnopq")],
    "n": [0, 129],
    "best_of": [0, 129],
    "timeout_s": [0.0, -1.0, NAN, INF],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in TAKEN.items() for value in values])
async def test_extreme_parameters_reach_the_engine(gateway: RunningGateway, field: str, value: object) -> None:
    options = GenerateOptions(**{field: value, "max_tokens": 1})  # type: ignore[arg-type]
    async with forced(gateway.session, endless) as submits:
        await collect(gateway.client.generate("a", options))
    assert getattr(submits[0].sampling, field) == pytest.approx(value)


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values])
async def test_parameters_out_of_range_are_refused(gateway: RunningGateway, field: str, value: object) -> None:
    async with neighbour(gateway):
        with pytest.raises(InvalidRequestError, match=rf"\b{field}\b.*(must|at most|allowed)"):
            await collect(gateway.client.generate("a", GenerateOptions(**{field: value})))  # type: ignore[arg-type]
    assert gateway.session.submits.empty()


async def test_neighbours_of_one_request_do_not_mix(gateway: RunningGateway) -> None:
    async with forced(gateway.session, lambda submit: submit.prompt_token_ids.tolist()):
        outputs = await asyncio.gather(
            *(collect(gateway.client.generate([97 + index] * 3, GenerateOptions(max_tokens=3))) for index in range(8))
        )
    assert [text_of(deltas) for deltas in outputs] == [chr(97 + index) * 3 for index in range(8)]
