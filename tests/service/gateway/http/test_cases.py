"""Faults of other servers, as they would show over HTTP: a whole gateway with a scripted engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from shared.messages import FinishReason
from shared.status import StatusCode
from tests.fakes.fake_scheduler import ENGINE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx2

    from tests.fakes.fake_scheduler import FakeSession
    from tests.service.gateway.http.conftest import RunningGateway, StartGateway

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "x"}
ABSENT = object()


@pytest.fixture
async def gateway(start_gateway: StartGateway) -> AsyncIterator[RunningGateway]:
    """A gateway whose engine answers every request with as many x as it may."""
    async with start_gateway() as running:
        engine = asyncio.create_task(answer(running.session))
        yield running
        engine.cancel()
        await asyncio.wait([engine])


async def answer(session: FakeSession) -> None:
    while True:
        submit = await session.submits.get()
        session.end(submit.handle, FinishReason.LENGTH, *b"x" * submit.max_tokens)


@contextlib.asynccontextmanager
async def neighbour(running: RunningGateway) -> AsyncIterator[None]:
    """A stream that is open all the while, and whole at its end."""
    session = running.session
    body = {"prompt": "neighbour", "max_tokens": 3, "stream": True, "seed": 77}
    async with running.client.stream("POST", COMPLETIONS, json=body) as stream:
        submit = await session.submitted()
        session.tokens(submit.handle, *b"ok")
        chunks = stream.aiter_text()
        assert '"ok"' in await anext(chunks)
        engine = asyncio.create_task(answer(session))
        yield
        engine.cancel()
        await asyncio.wait([engine])
        session.end(submit.handle, FinishReason.LENGTH, *b"!")
        rest = "".join([chunk async for chunk in chunks])
        assert '"text":"!"' in rest
        assert rest.endswith("data: [DONE]\n\n")


def with_field(body: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    return body if value is ABSENT else body | {name: value}


def chunks_of(response: httpx2.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_7_every_max_tokens_with_and_without_echo(start_gateway: StartGateway) -> None:
    async with start_gateway() as running, neighbour(running):
        for echo in (False, True):
            body = {"prompt": "ab", "echo": echo}
            for value, num_tokens in ((1, 1), (None, 16), (ABSENT, 16), (0, 0 if echo else None)):
                response = await running.client.post(COMPLETIONS, json=with_field(body, "max_tokens", value))
                if num_tokens is None:
                    assert response.status_code == 400
                    assert response.json()["error"]["param"] == "max_tokens"
                    continue
                assert response.status_code == 200, response.text
                assert response.json()["usage"]["completion_tokens"] == num_tokens
                assert response.json()["choices"][0]["text"] == "ab" * echo + "x" * num_tokens
            for value in (-1, 1 << 31, 1 << 70, "5", 1.5, True):
                response = await running.client.post(COMPLETIONS, json=body | {"max_tokens": value})
                assert response.status_code == 400, value
                assert "max_tokens" in response.json()["error"]["message"]


async def test_8_what_a_missing_limit_means(gateway: RunningGateway) -> None:
    prompt_tokens = (await gateway.client.post("/tokenize", json={"messages": [USER]})).json()["count"]
    left = min(ENGINE.max_model_len, ENGINE.num_slots) - prompt_tokens
    for body, num_tokens in (
        ({}, left),
        ({"max_tokens": None}, left),
        ({"max_completion_tokens": 7}, 7),
        ({"max_completion_tokens": 7, "max_tokens": None}, 7),
    ):
        response = await gateway.client.post(CHAT, json={"messages": [USER], **body})
        assert response.json()["usage"]["completion_tokens"] == num_tokens
        assert response.json()["usage"]["prompt_tokens"] == prompt_tokens
        assert response.json()["choices"][0]["finish_reason"] == "length"
    assert (await gateway.client.post(COMPLETIONS, json={"prompt": "x"})).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", [[], [[]], [[1], []], None, ABSENT])
async def test_11_empty_prompts_are_refused(start_gateway: StartGateway, prompt: Any) -> None:
    async with start_gateway() as running, neighbour(running):
        response = await running.client.post(COMPLETIONS, json=with_field({"max_tokens": 1}, "prompt", prompt))
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("prompt")


async def test_11_an_empty_text_is_the_begin_token_and_an_empty_turn_is_one(gateway: RunningGateway) -> None:
    for prompt in ("", [""], ["a", ""]):
        response = await gateway.client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1})
        assert response.status_code == 200
        assert response.json()["usage"]["prompt_tokens"] == (3 if prompt == ["a", ""] else 1)
    for messages, status in (([], 400), ([USER | {"content": ""}], 200), ([USER | {"content": " \n"}], 200)):
        assert (await gateway.client.post(CHAT, json={"messages": messages})).status_code == status


@pytest.mark.parametrize("token_id", [-1, ENGINE.vocab_size - 1, ENGINE.vocab_size, 1 << 40, "12", 1.0])
async def test_12_ids_outside_the_vocabulary(start_gateway: StartGateway, token_id: Any) -> None:
    async with start_gateway() as running, neighbour(running):
        for field, value in (
            ("prompt", [1, token_id]),
            ("prompt", [[1], [2, token_id]]),
            ("stop_token_ids", [token_id]),
            ("logit_bias", {str(token_id): 1}),
        ):
            response = await running.client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1} | {field: value})
            known = token_id == ENGINE.vocab_size - 1 or (field == "logit_bias" and token_id == "12")
            assert response.status_code == (200 if known else 400), (field, response.text)
            if not known:
                assert response.json()["error"]["param"].partition("[")[0] == field
                if isinstance(token_id, int):
                    assert str(token_id) in response.json()["error"]["message"]
                    assert str(ENGINE.vocab_size - 1) in response.json()["error"]["message"]


@pytest.mark.parametrize("bias", ["101", "NaN", "1e400", "-101", "null", '"1"'])
async def test_12_biases_that_are_none(gateway: RunningGateway, bias: str) -> None:
    content = f'{{"prompt": "x", "logit_bias": {{"5": {bias}}}}}'
    headers = {"content-type": "application/json"}
    response = await gateway.client.post(COMPLETIONS, content=content, headers=headers)
    assert response.status_code == 400


async def test_14_300_prompts_are_too_many(gateway: RunningGateway) -> None:
    response = await gateway.client.post(COMPLETIONS, json={"prompt": ["x"] * 300, "max_tokens": 1, "stream": True})
    assert response.status_code == 400
    assert "128" in response.json()["error"]["message"]


@pytest.mark.parametrize("options", [ABSENT, None, {}, {"include_usage": False}, {"include_usage": True}, True])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stop": ["xx"]}, {"max_tokens": 0, "echo": True}])
async def test_19_usage(gateway: RunningGateway, options: Any, stream: bool, more: dict[str, Any]) -> None:
    body = {"prompt": "x", "max_tokens": 4, **more}
    response = await gateway.client.post(
        COMPLETIONS, json=with_field(body | {"stream": stream}, "stream_options", options)
    )
    if options is True or (options not in {ABSENT, None} if not isinstance(options, dict) else not stream):
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "stream_options"
        return
    assert response.status_code == 200, response.text
    if not stream:
        assert "usage" in response.json()
        return
    chunks = chunks_of(response)
    if options == {"include_usage": True}:
        unstreamed = (await gateway.client.post(COMPLETIONS, json=body)).json()["usage"]
        assert [chunk["usage"] for chunk in chunks] == [None] * (len(chunks) - 1) + [unstreamed]
        assert [chunk["choices"] == [] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    else:
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize(
    "body", [{"n": 0}, {"prompt": "x" * 100}, {"prompt": [1] * 64}, {"max_tokens": 64}, {"stop": [""]}]
)
async def test_21_what_can_be_known_beforehand_is_no_stream(gateway: RunningGateway, body: dict[str, Any]) -> None:
    response = await gateway.client.post(COMPLETIONS, json={"prompt": "x", "stream": True, **body})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_21_a_failure_after_five_tokens(start_gateway: StartGateway, path: str) -> None:
    async with start_gateway() as running:
        body = {"prompt": "x"} if path == COMPLETIONS else {"messages": [USER]}
        async with running.client.stream("POST", path, json=body | {"stream": True, "max_tokens": 9}) as stream:
            submit = await running.session.submitted()
            running.session.tokens(submit.handle, *b"hello")
            running.session.end(
                submit.handle, FinishReason.ERROR, error_code=StatusCode.UNAVAILABLE, error_message="a stage is lost"
            )
            text = await asyncio.wait_for(_text(stream), 1)
        *_, last, empty = text.split("\n\n")
        assert empty == ""
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "a stage is lost"
        assert '"finish_reason":"' not in text
        assert "[DONE]" not in text


async def _text(stream: httpx2.Response) -> str:
    return "".join([part async for part in stream.aiter_text()])


async def test_26_valid_conversations_of_every_kind(gateway: RunningGateway) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for messages, status in (
        ([{"role": "system", "content": "s"}, USER], 200),
        ([{"role": "developer", "content": "s"}, USER], 200),
        ([USER, USER], 200),
        ([USER, {"role": "assistant", "content": None, "tool_calls": [call]}], 200),
        ([USER | {"content": [{"type": "text", "text": "a"}]}], 200),
        ([USER | {"role": "banana"}], 400),
        ([USER | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}], 400),
    ):
        response = await gateway.client.post(CHAT, json={"messages": messages, "max_tokens": 1})
        assert response.status_code == status, (messages, response.text)
