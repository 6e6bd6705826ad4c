"""Every bad input is refused with INVALID_ARGUMENT and a message that names field, value and limit."""

from __future__ import annotations

from time import process_time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc import aio

from shared.client import ChatMessage, GenerateOptions
from shared.errors import InvalidRequestError
from shared.pb import gateway_pb2, gateway_pb2_grpc
from shared.rpc import connect
from tests.fakes.fake_scheduler import ENGINE

if TYPE_CHECKING:
    from tests.service.gateway.conftest import RunningGateway

NAN = float("nan")


def generate(**fields: Any) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(**{"prompts": [gateway_pb2.Prompt(text="a")]} | fields)


def with_text(text: str) -> gateway_pb2.GenerateRequest:
    return generate(prompts=[gateway_pb2.Prompt(text=text)])


def with_options(**fields: Any) -> gateway_pb2.GenerateRequest:
    return generate(options=fields)


def with_sampling(**fields: float) -> gateway_pb2.GenerateRequest:
    return with_options(sampling=fields)


def with_ids(*ids: int, **options: Any) -> gateway_pb2.GenerateRequest:
    return generate(prompts=[gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=ids))], options=options)


BAD = {
    "no prompt": (gateway_pb2.GenerateRequest(), "prompts is empty; send at least one"),
    "empty prompt": (generate(prompts=[gateway_pb2.Prompt()]), "prompts[0] is empty; set text or token_ids"),
    "no ids": (with_ids(), "the prompt has no tokens; send at least one"),
    "id over the vocabulary": (with_ids(1, 300), "prompt[1] is 300; the model knows token ids from 0 to 299 only"),
    "huge id": (with_ids(2**32 - 1), "prompt[0] is 4294967295; the model knows token ids from 0 to 299 only"),
    "stop id over the vocabulary": (
        with_options(stop_token_ids=[299, 300]),
        "stop_token_ids[1] is 300; the model knows token ids from 0 to 299 only",
    ),
    "too many stop ids": (
        with_options(stop_token_ids=range(1025)),
        "stop_token_ids has 1025 ids; at most 1024 are allowed",
    ),
    "no output": (with_options(max_tokens=0), "max_tokens is 0; it must be at least 1"),
    "negative output": (with_options(max_tokens=-3), "max_tokens is -3; it must be at least 1"),
    "prompt as long as the context": (
        with_ids(*[1] * 64, max_tokens=1),
        "the prompt has 64 tokens; with a context of 64 tokens it may have 63",
    ),
    "over the context": (
        with_ids(*[1] * 60, max_tokens=5),
        "prompt (60 tokens) and max_tokens (5) add up to 65, over the context of 64 tokens; ask for at most 4",
    ),
    "over the context by default": (
        with_ids(*[1] * 60),
        "prompt (60 tokens) and max_tokens (16 by default) add up to 76, over the context of 64 tokens",
    ),
    "over the capacity": (
        with_ids(*[1] * 20, max_tokens=29),
        "prompt (20 tokens) and max_tokens (29) add up to 49, over the engine's capacity of 48 K/V slots",
    ),
    "cold": (with_sampling(temperature=-0.5), "temperature is -0.5; it must be between 0 and 100"),
    "hot": (with_sampling(temperature=101), "temperature is 101; it must be between 0 and 100"),
    "temperature nan": (with_sampling(temperature=NAN), "temperature is nan; it must be between 0 and 100"),
    "temperature inf": (with_sampling(temperature=float("inf")), "temperature is inf; it must be between 0 and 100"),
    "top_p zero": (with_sampling(top_p=0), "top_p is 0; it must be above 0 and at most 1"),
    "no penalty": (
        with_options(sampling={"repetition_penalty": 0}),
        "repetition_penalty is 0; it must be above 0",
    ),
    "top_p above one": (with_sampling(top_p=1.5), "top_p is 1.5; it must be above 0 and at most 1"),
    "top_p nan": (with_sampling(top_p=NAN), "top_p is nan; it must be above 0 and at most 1"),
    "min_p negative": (with_sampling(min_p=-1), "min_p is -1; it must be between 0 and 1"),
    "min_p above one": (with_sampling(min_p=2), "min_p is 2; it must be between 0 and 1"),
    "min_p nan": (with_sampling(min_p=NAN), "min_p is nan; it must be between 0 and 1"),
    "long name": (generate(request_id="n" * 129), "request_id has 129 characters; at most 128 are allowed"),
    "name with a line feed": (generate(request_id="a\nb"), r"request_id 'a\nb' must be printable ASCII"),
    "name with an umlaut": (generate(request_id="ä"), r"request_id '\xe4' must be printable ASCII"),
    "huge text": (with_text("é" * 32769), "text has 65538 bytes; at most 65536 are allowed for a context of 64"),
    "long text": (with_text("x" * 100), "the prompt has 101 tokens; with a context of 64 tokens it may have 63"),
}


@pytest.mark.parametrize("name", BAD)
async def test_generate_refuses(gateway: RunningGateway, name: str) -> None:
    request, message = BAD[name]
    async with connect(gateway.address) as channel:
        call = gateway_pb2_grpc.GatewayStub(channel).Generate(request)
        with pytest.raises(aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in str(caught.value.details())
    assert gateway.session.submits.empty()
    assert (await gateway.client.status()).num_gateway_requests == 0


CHATS: dict[str, tuple[list[ChatMessage], dict[str, Any], str]] = {
    "no messages": ([], {}, "messages is empty; send at least one"),
    "another role": (
        [ChatMessage("evil", "a")],
        {},
        "messages[0].role is 'evil'; send one of 'system', 'developer', 'user', 'assistant', 'tool'",
    ),
    "no role": ([ChatMessage("user", "a"), ChatMessage("", "b")], {}, "messages[1].role is empty"),
    "huge": ([ChatMessage("user", "a" * 70000)], {}, "messages has 70004 bytes; at most 65536 are allowed"),
    "over the context": ([ChatMessage("user", "a" * 50)], {}, "the prompt has 69 tokens; with a context of 64"),
    "over the capacity": (
        [ChatMessage("user", "a" * 32)],
        {},
        "prompt (51 tokens) and max_tokens (1 by default) add up to 52, over the engine's capacity of 48 K/V slots",
    ),
    "no output": ([ChatMessage("user", "a")], {"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
}


@pytest.mark.parametrize("name", CHATS)
async def test_chat_refuses(gateway: RunningGateway, name: str) -> None:
    messages, options, message = CHATS[name]
    with pytest.raises(InvalidRequestError) as caught:
        await anext(gateway.client.chat(messages, GenerateOptions(**options)))
    assert message in str(caught.value)


MANY: dict[str, gateway_pb2.GenerateRequest | gateway_pb2.ChatRequest] = {
    "there are 1000000 prompts; at most 128": gateway_pb2.GenerateRequest(prompts=[gateway_pb2.Prompt()] * 1_000_000),
    "there are 1000000 messages; at most 4096": gateway_pb2.ChatRequest(
        messages=[gateway_pb2.ChatMessage()] * 1_000_000
    ),
    "the messages have 1000000 calls of tools; at most 4096": gateway_pb2.ChatRequest(
        messages=[gateway_pb2.ChatMessage(role="assistant", tool_calls=[gateway_pb2.ToolCall()] * 1_000_000)]
    ),
}


@pytest.mark.parametrize("message", MANY)
async def test_what_is_too_many_is_counted_before_it_is_looked_at(gateway: RunningGateway, message: str) -> None:
    request = MANY[message]
    async with connect(gateway.address) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        started = process_time()
        call = stub.Chat(request) if isinstance(request, gateway_pb2.ChatRequest) else stub.Generate(request)
        with pytest.raises(aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in str(caught.value.details())
    assert process_time() - started < 1


async def test_a_message_is_no_larger_than_it_need_be(gateway: RunningGateway) -> None:
    async with connect(gateway.address) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await gateway_pb2_grpc.GatewayStub(channel).Generate(with_text("a" * (8 << 20))).read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("timeout_s", [NAN, float("inf"), float("-inf"), -1.0, 0.0])
async def test_a_time_that_is_none_is_refused(gateway: RunningGateway, timeout_s: float) -> None:
    async with connect(gateway.address) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await gateway_pb2_grpc.GatewayStub(channel).Generate(with_options(timeout_s=timeout_s)).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "timeout_s is" in str(caught.value.details())


@pytest.mark.parametrize(
    "request_of",
    [
        with_ids(*[1] * 47, max_tokens=1),
        with_ids(*range(32)),
        with_ids(0, 299),
        with_options(stop_token_ids=[0, 299], max_tokens=46),
        with_sampling(temperature=0, top_p=1, min_p=1),
        with_sampling(temperature=100, top_k=2**32 - 1, top_p=1e-6, seed=0),
        generate(request_id="~" * 128),
        with_text(""),  # this tokenizer begins every text with a token
    ],
)
async def test_values_at_the_limits_are_taken(gateway: RunningGateway, request_of: gateway_pb2.GenerateRequest) -> None:
    async with connect(gateway.address) as channel:
        call = gateway_pb2_grpc.GatewayStub(channel).Generate(request_of)
        await call.read()
        submit = await gateway.session.submitted()
        call.cancel()
        assert await gateway.session.cancelled() == submit.handle


async def test_tokenize_refuses_a_huge_text(gateway: RunningGateway) -> None:
    with pytest.raises(InvalidRequestError, match="text has 65537 bytes; at most 65536 are allowed"):
        await gateway.client.tokenize("a" * 65537)


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([-1], {}),
        ([2**32], {}),
        (["a"], {}),
        ("a\ud800", {}),
        ("a", {"max_tokens": 2**31}),
        ("a", {"seed": -1}),
        ("a", {"stop_token_ids": (2**40,)}),
    ],
)
async def test_the_client_refuses_what_no_message_can_hold(gateway: RunningGateway, prompt: Any, options: Any) -> None:
    with pytest.raises(InvalidRequestError, match="the request cannot be sent"):
        await anext(gateway.client.generate(prompt, GenerateOptions(**options)))


def test_the_cases_fit_the_engine() -> None:
    assert (ENGINE.max_model_len, ENGINE.num_slots, ENGINE.vocab_size) == (64, 48, 300)
