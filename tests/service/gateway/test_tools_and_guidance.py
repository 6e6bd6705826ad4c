"""What the output must match, and calls of tools: from the request to the engine and back."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest

from services.gateway.served_model import ModelText, load_model_text
from services.gateway.text.chat_template import ChatTemplate
from shared.client import ChatMessage, ChatRequest, Delta, GenerateOptions, GenerateRequest
from shared.errors import InvalidRequestError
from shared.generation import Guidance, GuidanceKind, Tool, ToolChoice, ToolMode
from shared.messages import FinishReason
from tests.fakes.fake_scheduler import ENGINE, FakeScheduler
from tests.fakes.forced_tokens import forced

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.service.gateway.conftest import RunningGateway, StartGateway

EOS = 256
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} call as <tool_call>{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WEATHER = Tool("weather", "Tells it.", json.dumps({"type": "object", "properties": {"city": {"type": "string"}}}))
QUESTION = [ChatMessage("user", "how is it in Ulm?")]
CALL = b'<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm \xc3\xa4"}}\n</tool_call>'


async def collect(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


def load(name: str) -> ModelText:
    return ModelText(load_model_text(name).tokenizer, {"default": ChatTemplate(TEMPLATE)})


def large() -> FakeScheduler:
    return FakeScheduler(engine=dataclasses.replace(ENGINE, max_model_len=1000, num_slots=1000))


@pytest.mark.parametrize("at_once", [1, 7, 999])
@pytest.mark.parametrize("num_calls", [0, 1, 2])
async def test_calls_are_taken_out_of_the_text(start_gateway: StartGateway, at_once: int, num_calls: int) -> None:
    output = [*b"Let me see. ", *(CALL * num_calls), EOS]
    async with start_gateway(scheduler=large(), load=load) as gateway:
        await gateway.health(serving=True)
        async with forced(gateway.session, lambda _: output, at_once=at_once) as submits:
            request = ChatRequest(QUESTION, GenerateOptions(max_tokens=500, n=2), tools=[WEATHER])
            deltas = await collect(gateway.client.chat(request))
    assert b'"name": "weather"' in bytes(submits[0].prompt_token_ids[1:].tolist())
    assert submits[0].grammar == ""
    for choice in range(2):
        own = [delta for delta in deltas[1:] if delta.choice == choice]
        assert "".join(delta.text for delta in own).strip() == "Let me see."
        assert [token_id for delta in own for token_id in delta.token_ids] == output
        pieces = [piece for delta in own for piece in delta.tool_calls]
        assert [piece.index for piece in pieces if piece.id] == list(range(num_calls))
        for index in range(num_calls):
            call = [piece for piece in pieces if piece.index == index]
            assert call[0].name == "weather"
            assert json.loads("".join(piece.arguments for piece in call)) == {"city": "Ulm ä"}
        finish = own[-1].finish
        assert finish is not None
        assert finish.reason is (FinishReason.TOOL_CALLS if num_calls else FinishReason.STOP)
    ids = [piece.id for delta in deltas for piece in delta.tool_calls if piece.id]
    assert len(set(ids)) == 2 * num_calls


@pytest.mark.parametrize("at_once", [1, 7, 999])
@pytest.mark.parametrize(("stop", "num_more"), [((), 0), (("}\n!",), 2)])
async def test_an_output_that_may_have_one_call_ends_with_it(
    start_gateway: StartGateway, at_once: int, stop: tuple[str, ...], num_more: int
) -> None:
    output = [*b"Let me see. ", *CALL, *CALL, EOS]
    async with start_gateway(scheduler=large(), load=load) as gateway:
        await gateway.health(serving=True)
        async with forced(gateway.session, lambda _: output, at_once=at_once) as submits:
            options = GenerateOptions(max_tokens=500, num_logprobs=0, min_tokens=200, stop=stop)
            request = ChatRequest(QUESTION, options, tools=[WEATHER], parallel_tool_calls=False)
            deltas = await collect(gateway.client.chat(request))
        if at_once == 1:
            assert await gateway.session.cancelled() == submits[0].handle
    assert "".join(delta.text for delta in deltas) == "Let me see. "
    pieces = [piece for delta in deltas for piece in delta.tool_calls]
    assert {piece.index for piece in pieces} == {0}
    assert json.loads("".join(piece.arguments for piece in pieces)) == {"city": "Ulm ä"}
    shown = [token_id for delta in deltas for token_id in delta.token_ids]
    # What might have become a stop string was held back with the end of the call.
    assert shown == output[: output.index(ord("\n"), 30) + num_more]
    assert [entry.token_id for delta in deltas for entry in delta.logprobs] == shown
    finish = deltas[-1].finish
    assert finish is not None
    assert (finish.reason, finish.stop, finish.num_output_tokens) == (FinishReason.TOOL_CALLS, None, len(shown))


async def test_a_call_that_breaks_off_is_no_end_of_its_own(start_gateway: StartGateway) -> None:
    async with start_gateway(scheduler=large(), load=load) as gateway:
        await gateway.health(serving=True)
        async with forced(gateway.session, lambda _: CALL):
            options = GenerateOptions(max_tokens=len(CALL) - 20)
            *_, last = await collect(gateway.client.chat(ChatRequest(QUESTION, options, tools=[WEATHER])))
    assert last.finish is not None
    assert last.finish.reason is FinishReason.LENGTH


@pytest.mark.parametrize("choice", [ToolChoice(ToolMode.REQUIRED), ToolChoice(ToolMode.NAMED, "weather")])
async def test_a_call_can_be_forced(start_gateway: StartGateway, choice: ToolChoice) -> None:
    async with start_gateway(scheduler=large(), load=load) as gateway:
        await gateway.health(serving=True)
        async with forced(gateway.session, lambda _: [*CALL, EOS]) as submits:
            request = ChatRequest(QUESTION, GenerateOptions(max_tokens=200), tools=[WEATHER], tool_choice=choice)
            *_, last = await collect(gateway.client.chat(request))
    assert "weather" in submits[0].grammar
    assert last.finish is not None
    assert last.finish.reason is FinishReason.TOOL_CALLS


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [Tool("no name")]}, r"tools\[0\] has the name 'no name'"),
        ({"tool_choice": ToolChoice(ToolMode.REQUIRED)}, "there are no tools"),
        ({"tools": [WEATHER], "tool_choice": ToolChoice(ToolMode.NAMED, "time")}, "names 'time', which is none of"),
    ],
)
async def test_tools_that_make_no_sense_are_refused(
    gateway: RunningGateway, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        await collect(gateway.client.chat(ChatRequest(QUESTION, **fields)))


async def test_a_template_that_knows_no_tools_refuses_them(gateway: RunningGateway) -> None:
    with pytest.raises(InvalidRequestError, match="does not support tools"):
        await collect(gateway.client.chat(ChatRequest(QUESTION, tools=[WEATHER])))


async def test_a_conversation_can_go_on_with_its_last_message(start_gateway: StartGateway) -> None:
    async with start_gateway(scheduler=large(), load=load) as gateway:
        await gateway.health(serving=True)
        async with forced(gateway.session, lambda _: [*b" fine.", EOS]) as submits:
            messages = [*QUESTION, ChatMessage("assistant", "It is")]
            request = ChatRequest(messages, continue_final_message=True, return_prompt_token_ids=True)
            deltas = await collect(gateway.client.chat(request))
    assert bytes(submits[0].prompt_token_ids[1:].tolist()).endswith(b"assistant: It is")
    assert deltas[0].prompt_token_ids == (tuple(submits[0].prompt_token_ids),)
    assert "".join(delta.text for delta in deltas) == " fine."


async def test_guidance_goes_with_every_job_once_it_is_known_to_be_good(gateway: RunningGateway) -> None:
    digits = Guidance(GuidanceKind.REGEX, "[0-9]+")
    async with forced(gateway.session, lambda _: [*b"42", EOS]) as submits:
        options = GenerateOptions(guidance=digits, n=2)
        await collect(gateway.client.generate(GenerateRequest(["a", "b"], options)))
    assert len({submit.grammar for submit in submits}) == 1
    assert "[0-9]+" in submits[0].grammar
    with pytest.raises(InvalidRequestError, match="invalid regex"):
        await collect(gateway.client.generate("a", GenerateOptions(guidance=Guidance(GuidanceKind.REGEX, "("))))
    assert gateway.session.submits.empty()
