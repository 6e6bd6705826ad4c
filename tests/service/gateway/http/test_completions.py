"""``POST /v1/completions``: shapes, to the byte where they are OpenAI's."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from services.gateway.http.responses import Completion
from shared.generation import Delta, GenerateOptions, GenerateRequest, TokenLogprob, TopLogprob, Usage
from shared.messages import FinishReason
from tests.fakes.fake_generation import finish, last

if TYPE_CHECKING:
    from tests.service.gateway.http.conftest import RunningFront

PATH = "/v1/completions"
REQUEST_ID = {"X-Request-Id": "r1"}


def events(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream that ended well."""
    *parts, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def logprob(token: str, value: float | None, data: bytes | None = None, *others: tuple[str, float]) -> TokenLogprob:
    top = tuple(TopLogprob(1, name, name.encode(), other) for name, other in others)
    return TokenLogprob(0, token, token.encode() if data is None else data, value, top)


async def test_an_answer_in_one_piece(front: RunningFront) -> None:
    front.generation.answer = [Delta("hé"), Delta("llo", token_ids=(7,)), last("!")]
    response = await front.post(PATH, {"prompt": "x"}, headers=REQUEST_ID)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"] == "r1"
    body = response.json()
    created, fingerprint = body["created"], body["system_fingerprint"]
    assert response.text == (
        f'{{"id":"cmpl-r1","object":"text_completion","created":{created},"model":"synthetic:",'
        f'"system_fingerprint":"{fingerprint}","choices":[{{"index":0,"text":"héllo!","logprobs":null,'
        '"finish_reason":"length","stop_reason":null}],"usage":{"prompt_tokens":3,"completion_tokens":5,'
        '"total_tokens":8,"prompt_tokens_details":{"cached_tokens":2}}}'
    )
    Completion.model_validate_json(response.content)
    assert (await front.generation.call()).request == GenerateRequest(["x"], GenerateOptions(), request_id="r1")


async def test_an_answer_in_chunks(front: RunningFront) -> None:
    front.generation.answer = [Delta("hé"), Delta(), Delta("llo"), last("!")]
    response = await front.post(PATH, {"prompt": "x", "stream": True}, headers=REQUEST_ID)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-request-id"] == "r1"
    chunks = events(response.text)
    created, fingerprint = chunks[0]["created"], chunks[0]["system_fingerprint"]
    head = (
        f'data: {{"id":"cmpl-r1","object":"text_completion","created":{created},"model":"synthetic:",'
        f'"system_fingerprint":"{fingerprint}","choices":[{{"index":0,'
    )
    tail = '"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
    assert response.text == (
        f'{head}"text":"hé",{tail}{head}"text":"llo",{tail}'
        f'{head}"text":"!","logprobs":null,"finish_reason":"length","stop_reason":null}}]}}\n\n'
        "data: [DONE]\n\n"
    )
    for chunk in chunks:
        Completion.model_validate(chunk)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": None}, {"include_usage": False}])
async def test_usage_is_not_told_unasked(front: RunningFront, options: dict[str, Any] | None) -> None:
    front.generation.answer = [Delta("a"), last()]
    response = await front.post(PATH, {"prompt": "x", "stream": True, "stream_options": options})
    assert all("usage" not in chunk for chunk in events(response.text))


async def test_usage_is_one_last_chunk_without_choices(front: RunningFront) -> None:
    front.generation.answer = [Delta("a"), Delta("b", choice=1, finish=finish()), last()]
    body = {"prompt": "x", "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = events((await front.post(PATH, body)).text)
    assert [chunk["usage"] for chunk in chunks] == [None, None, None]
    assert usage["choices"] == []
    assert usage["usage"] == (await front.post(PATH, {"prompt": "x", "n": 2})).json()["usage"]
    Completion.model_validate(usage)


@pytest.mark.parametrize("stream", [None, False])
async def test_stream_options_belong_to_streams(front: RunningFront, stream: bool | None) -> None:
    error = await front.refused(PATH, {"prompt": "x", "stream": stream, "stream_options": {"include_usage": True}})
    assert error["param"] == "stream_options"


async def test_choices_are_in_their_order_however_they_end(front: RunningFront) -> None:
    front.generation.answer = [
        Delta("d", choice=3, finish=finish(FinishReason.STOP, "\n")),
        Delta("b", choice=1, finish=finish(FinishReason.STOP, 7)),
        Delta("c", choice=2, finish=finish()),
        Delta("a", finish=finish(), usage=Usage(2, 4)),
    ]
    body = (await front.post(PATH, {"prompt": ["x", "y"], "n": 2})).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert [choice["stop_reason"] for choice in body["choices"]] == [None, 7, None, "\n"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "stop", "length", "stop"]


LOGPROBS = (
    logprob("a", -0.5, None, ("a", -0.5), ("b", -1.5)),
    logprob("\ufffd", -1.0, b"\xf0\x9f"),
    logprob("\ufffd", -math.inf, b"\x98\x80", ("c", -2.0)),
    logprob("</s>", -0.25, b""),
)
SHOWN_LOGPROBS = {
    "tokens": ["a", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "</s>"],
    "token_logprobs": [-0.5, -1.0, -9999.0, -0.25],
    "top_logprobs": [
        {"a": -0.5, "b": -1.5},
        {"bytes:\\xf0\\x9f": -1.0},
        {"c": -2.0, "bytes:\\x98\\x80": -9999.0},
        {"</s>": -0.25},
    ],
    "text_offset": [0, 1, 1, 2],
}


async def test_log_probabilities_in_one_piece(front: RunningFront) -> None:
    front.generation.answer = [
        Delta("a", (1,), logprobs=LOGPROBS[:1]),
        Delta("\N{GRINNING FACE}", (2, 3, 4), finish(), logprobs=LOGPROBS[1:], usage=Usage(1, 4)),
    ]
    body = (await front.post(PATH, {"prompt": "x", "logprobs": 2})).json()
    assert body["choices"][0]["logprobs"] == SHOWN_LOGPROBS
    Completion.model_validate(body)
    assert (await front.generation.call()).request.options.num_logprobs == 2


async def test_log_probabilities_run_on_over_chunks(front: RunningFront) -> None:
    front.generation.answer = [
        Delta("a", (1,), logprobs=LOGPROBS[:1]),
        Delta("z", (1,), choice=1, finish=finish(), logprobs=(logprob("z", -1.0),)),
        Delta("", (2,), logprobs=LOGPROBS[1:2]),
        Delta("\N{GRINNING FACE}", (3, 4), finish(), logprobs=LOGPROBS[2:], usage=Usage(1, 4)),
    ]
    response = await front.post(PATH, {"prompt": "x", "n": 2, "logprobs": 2, "stream": True})
    shown = [choice["logprobs"] for chunk in events(response.text) if (choice := chunk["choices"][0])["index"] == 0]
    assert {key: [value for part in shown for value in part[key]] for key in SHOWN_LOGPROBS} == SHOWN_LOGPROBS


async def test_echo_begins_with_the_prompt_and_its_probabilities(front: RunningFront) -> None:
    prompt = (logprob("x", None), logprob("y", -0.5, None, ("z", -0.25)))
    front.generation.answer = [
        Delta("xy", (1, 2), logprobs=prompt, is_prompt=True),
        Delta("c", (3,), finish(), logprobs=(logprob("c", -1.0),), usage=Usage(2, 1)),
    ]
    asked = {"prompt": "xy", "echo": True, "logprobs": 1, "return_token_ids": True}
    body = (await front.post(PATH, asked)).json()
    [choice] = body["choices"]
    assert choice["text"] == "xyc"
    assert choice["logprobs"] == {
        "tokens": ["x", "y", "c"],
        "token_logprobs": [None, -0.5, -1.0],
        "top_logprobs": [None, {"z": -0.25, "y": -0.5}, {"c": -1.0}],
        "text_offset": [0, 1, 2],
    }
    assert choice["prompt_token_ids"] == [*b"xy"]
    assert choice["token_ids"] == [3]
    Completion.model_validate(body)
    (first,), (second,) = (
        chunk["choices"] for chunk in events((await front.post(PATH, asked | {"stream": True})).text)
    )
    assert (first["prompt_token_ids"], first["token_ids"]) == ([*b"xy"], [])
    assert second["token_ids"] == [3]
    assert "prompt_token_ids" not in second
    request = (await front.generation.call()).request
    assert isinstance(request, GenerateRequest)
    assert request.echo


async def test_token_ids_of_prompts_and_outputs(front: RunningFront) -> None:
    front.generation.answer = [
        Delta("c", (3,), choice=2),
        Delta("a", (1,)),
        Delta("", (9,), choice=2, finish=finish()),
        *(Delta(choice=choice, finish=finish()) for choice in (0, 1)),
        last(choice=3),
    ]
    asked = {"prompt": ["x", "yz"], "n": 2, "return_token_ids": True}
    body = (await front.post(PATH, asked)).json()
    Completion.model_validate(body)
    expected = [([*b"x"], [1]), ([*b"x"], []), ([*b"yz"], [3, 9]), ([*b"yz"], [])]
    assert [(choice["prompt_token_ids"], choice["token_ids"]) for choice in body["choices"]] == expected
    chunks = events((await front.post(PATH, asked | {"stream": True})).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[*b"yz"], [*b"x"], None, None, [*b"x"], [*b"yz"]]
    assert [choice["token_ids"] for choice in choices] == [[3], [1], [9], [], [], []]
    body = (await front.post(PATH, asked | {"return_token_ids": False})).json()
    assert {"token_ids", "prompt_token_ids"}.isdisjoint(body["choices"][0])


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("x", ["x"]), (["x", "y"], ["x", "y"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]]), ("", [""])],
)
async def test_prompts_of_every_kind(front: RunningFront, prompt: Any, prompts: list[Any]) -> None:
    front.generation.answer = [*(Delta(choice=index, finish=finish()) for index in range(len(prompts))), last()]
    assert (await front.post(PATH, {"prompt": prompt})).status_code == 200
    request = (await front.generation.call()).request
    assert isinstance(request, GenerateRequest)
    assert request.prompts == prompts


@pytest.mark.parametrize(
    "prompt", [None, [], 5, True, {}, [True], [1.0], ["a", 1], [["a"]], [[1], "a"], [[[1]]], [None]]
)
async def test_prompts_of_no_kind(front: RunningFront, prompt: Any) -> None:
    assert (await front.refused(PATH, {"prompt": prompt}))["param"] == "prompt"


async def test_best_of_is_not_streamed(front: RunningFront) -> None:
    error = await front.refused(PATH, {"prompt": "x", "best_of": 3, "stream": True})
    assert error["param"] == "best_of"
    front.generation.answer = [last("best")]
    assert (await front.post(PATH, {"prompt": "x", "best_of": 3})).json()["choices"][0]["text"] == "best"
    assert (await front.generation.call()).request.options.best_of == 3
