"""``POST /v1/chat/completions``: shapes, to the byte where they are OpenAI's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from services.gateway.http.responses import ChatCompletion, ChatCompletionChunk
from shared.generation import (
    ChatMessage,
    ChatRequest,
    Delta,
    GenerateOptions,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    ToolMode,
    TopLogprob,
    Usage,
)
from shared.messages import FinishReason
from tests.fakes.fake_generation import finish, last

if TYPE_CHECKING:
    from tests.service.gateway.http.conftest import RunningFront

PATH = "/v1/chat/completions"
REQUEST_ID = {"X-Request-Id": "r1"}
USER = {"role": "user", "content": "x"}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


async def request_of(front: RunningFront, **body: Any) -> ChatRequest:
    """What generation is asked for a body that is fine."""
    front.generation.answer = [last("y")]
    response = await front.post(PATH, {"messages": [USER]} | body, headers=REQUEST_ID)
    assert response.status_code == 200, response.text
    request = (await front.generation.call()).request
    assert isinstance(request, ChatRequest)
    return request


def events(text: str) -> list[dict[str, Any]]:
    *parts, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(part.removeprefix("data: ")) for part in parts]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    return chunks


async def test_an_answer_in_one_piece(front: RunningFront) -> None:
    front.generation.answer = [Delta("hé"), last("llo!", reason=FinishReason.STOP)]
    response = await front.post(PATH, {"messages": [USER]}, headers=REQUEST_ID)
    body = response.json()
    created, fingerprint = body["created"], body["system_fingerprint"]
    assert response.text == (
        f'{{"id":"chatcmpl-r1","object":"chat.completion","created":{created},"model":"synthetic:",'
        f'"system_fingerprint":"{fingerprint}","choices":[{{"index":0,"message":{{"role":"assistant",'
        '"content":"héllo!","refusal":null},"logprobs":null,"finish_reason":"stop","stop_reason":null}],'
        '"usage":{"prompt_tokens":3,"completion_tokens":5,"total_tokens":8,'
        '"prompt_tokens_details":{"cached_tokens":2}}}'
    )
    ChatCompletion.model_validate_json(response.content)
    call = await front.generation.call()
    assert call.request == ChatRequest([ChatMessage("user", "x")], GenerateOptions(), request_id="r1")


async def test_an_answer_in_chunks_begins_with_the_role_and_ends_with_the_reason(front: RunningFront) -> None:
    front.generation.answer = [Delta("hé"), Delta(), last("llo!")]
    response = await front.post(PATH, {"messages": [USER], "stream": True}, headers=REQUEST_ID)
    first = events(response.text)[0]
    created, fingerprint = first["created"], first["system_fingerprint"]
    head = (
        f'data: {{"id":"chatcmpl-r1","object":"chat.completion.chunk","created":{created},"model":"synthetic:",'
        f'"system_fingerprint":"{fingerprint}","choices":[{{"index":0,"delta":'
    )
    tail = ',"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
    assert response.text == (
        f'{head}{{"role":"assistant","content":"","refusal":null}}{tail}'
        f'{head}{{"content":"hé"}}{tail}{head}{{"content":"llo!"}}{tail}'
        f'{head}{{}},"logprobs":null,"finish_reason":"length","stop_reason":null}}]}}\n\n'
        "data: [DONE]\n\n"
    )


async def test_every_choice_has_a_role_an_end_and_the_usage_comes_once(front: RunningFront) -> None:
    front.generation.answer = [Delta("b", choice=1, finish=finish()), last("a")]
    body = {"messages": [USER], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = events((await front.post(PATH, body)).text)
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 1, 1, 1, 0, 0]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length", None, "length"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 8


async def test_token_ids_of_conversation_and_outputs(front: RunningFront) -> None:
    front.generation.answer = [Delta("b", (4,), choice=1, finish=finish()), Delta("a", (5,)), last()]
    asked = {"messages": [USER], "n": 2, "return_token_ids": True}
    body = (await front.post(PATH, asked)).json()
    ChatCompletion.model_validate(body)
    assert body["prompt_token_ids"] == [1, 2, 3]
    assert [choice["token_ids"] for choice in body["choices"]] == [[5], [4]]
    chunks = events((await front.post(PATH, asked | {"stream": True})).text)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[1, 2, 3], *[None] * (len(chunks) - 1)]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[], [], [4], [], [5], []]
    assert "prompt_token_ids" not in (await front.post(PATH, {"messages": [USER]})).json()


async def test_log_probabilities(front: RunningFront) -> None:
    top = (TopLogprob(1, "a", b"a", -0.5), TopLogprob(2, "b", b"b", float("-inf")))
    front.generation.answer = [
        Delta("", (1,), logprobs=(TokenLogprob(1, "\ufffd", b"\xc3", -0.5, top),)),
        Delta("é", (2,), finish(), logprobs=(TokenLogprob(2, "\ufffd", b"\xa9", -1.0),), usage=Usage(1, 2)),
    ]
    asked = {"messages": [USER], "logprobs": True, "top_logprobs": 2}
    body = (await front.post(PATH, asked)).json()
    content = [
        {
            "token": "\ufffd",
            "bytes": [0xC3],
            "logprob": -0.5,
            "top_logprobs": [
                {"token": "a", "bytes": [97], "logprob": -0.5},
                {"token": "b", "bytes": [98], "logprob": -9999.0},
            ],
        },
        {"token": "\ufffd", "bytes": [0xA9], "logprob": -1.0, "top_logprobs": []},
    ]
    assert body["choices"][0]["logprobs"] == {"content": content, "refusal": None}
    ChatCompletion.model_validate(body)
    chunks = events((await front.post(PATH, asked | {"stream": True})).text)
    shown = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [part["content"] for part in shown if part is not None] == [content[:1], content[1:]]
    assert (await front.generation.call()).request.options.num_logprobs == 2


async def test_log_probabilities_alone_are_those_of_the_tokens(front: RunningFront) -> None:
    assert (await request_of(front, logprobs=True)).options.num_logprobs == 0
    assert (await request_of(front, logprobs=False)).options.num_logprobs is None
    assert (await front.refused(PATH, {"messages": [USER], "top_logprobs": 2}))["param"] == "top_logprobs"
    assert (await front.refused(PATH, {"messages": [USER], "logprobs": True, "top_logprobs": 21}))[
        "param"
    ] == "top_logprobs"


async def test_tool_calls(front: RunningFront) -> None:
    front.generation.answer = [
        Delta(tool_calls=(ToolCallDelta(0, "call_1", "weather"),)),
        Delta(tool_calls=(ToolCallDelta(0, arguments='{"city":'),)),
        Delta(tool_calls=(ToolCallDelta(0, arguments='"Rome"}'), ToolCallDelta(1, "call_2", "weather", "{}"))),
        last(reason=FinishReason.TOOL_CALLS),
    ]
    asked = {"messages": [USER], "tools": [WEATHER]}
    body = (await front.post(PATH, asked)).json()
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}},
            {"id": "call_2", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
        ],
    }
    ChatCompletion.model_validate(body)
    chunks = events((await front.post(PATH, asked | {"stream": True})).text)
    assert [chunk["choices"][0]["delta"] for chunk in chunks[1:]] == [
        {
            "tool_calls": [
                {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]},
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": '"Rome"}'}},
                {"index": 1, "id": "call_2", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
            ]
        },
        {},
    ]


async def test_tools_and_their_choice(front: RunningFront) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    request = await request_of(front, tools=[WEATHER], tool_choice=named)
    assert request.tools == (Tool("weather", "", '{"type":"object","properties":{}}'),)
    assert request.tool_choice == ToolChoice(ToolMode.NAMED, "weather")
    for mode in ("auto", "none", "required"):
        assert (await request_of(front, tools=[WEATHER], tool_choice=mode)).tool_choice.mode is ToolMode(mode)
    assert (await request_of(front, tools=[], tool_choice="none")).tools == ()
    for parallel in (None, True, False):
        asked = await request_of(front, tools=[WEATHER], parallel_tool_calls=parallel)
        assert asked.parallel_tool_calls is (parallel is not False)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "weather"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
    ],
)
async def test_tools_that_are_none(front: RunningFront, body: dict[str, Any], param: str) -> None:
    assert (await front.refused(PATH, {"messages": [USER], **body}))["param"] == param


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


async def test_messages_of_every_role(front: RunningFront) -> None:
    request = await request_of(
        front,
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []},
            {"role": "tool", "content": "warm", "tool_call_id": "c1"},
            {"role": "assistant", "content": None, "refusal": "no", "audio": None, "function_call": None},
            {"role": "system", "content": ""},
            {"role": "assistant"},
        ],
    )
    assert request.messages == [
        ChatMessage("system", "be brief"),
        ChatMessage("user", "a\nb", name="Ann"),
        ChatMessage("assistant", "", (ToolCall("c1", "weather", "{}"),)),
        ChatMessage("tool", "warm", tool_call_id="c1"),
        ChatMessage("assistant", "no"),
        ChatMessage("system"),
        ChatMessage("assistant"),
    ]


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "banana", "content": "x"}, "messages[0].role"),
        ({"role": "function", "content": "x", "name": "f"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [IMAGE]}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": ["text"], "text": "x"}]}, "messages[0].content"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "messages[0].tool_call_id"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, "messages[0].function_call"),
        ({"role": "user", "content": "x", "mood": "good"}, "messages[0].mood"),
        ("hello", "messages[0]"),
    ],
)
async def test_messages_that_are_none(front: RunningFront, message: Any, param: str) -> None:
    assert (await front.refused(PATH, {"messages": [message]}))["param"] == param


async def test_the_limit_has_two_names(front: RunningFront) -> None:
    assert (await request_of(front)).options.max_tokens is None
    assert (await request_of(front, max_tokens=None, max_completion_tokens=7)).options.max_tokens == 7
    assert (await request_of(front, max_tokens=8)).options.max_tokens == 8
    assert (await request_of(front, max_tokens=9, max_completion_tokens=9)).options.max_tokens == 9
    error = await front.refused(PATH, {"messages": [USER], "max_tokens": 8, "max_completion_tokens": 7})
    assert error["param"] == "max_completion_tokens"
    assert "8" in error["message"]
    assert "7" in error["message"]


async def test_the_last_message_can_be_continued(front: RunningFront) -> None:
    assert not (await request_of(front, add_generation_prompt=True)).continue_final_message
    assert (await request_of(front, continue_final_message=True)).continue_final_message
    assert (await request_of(front, continue_final_message=True, add_generation_prompt=False)).continue_final_message
    for body in (
        {"continue_final_message": True, "add_generation_prompt": True},
        {"continue_final_message": False, "add_generation_prompt": False},
    ):
        assert "add_generation_prompt" in (await front.refused(PATH, {"messages": [USER], **body}))["message"]
