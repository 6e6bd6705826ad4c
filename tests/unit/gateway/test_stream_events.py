"""The quick way of a token to an HTTP client says what the usual one does, and gives way to it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.http.answer import Head
from services.gateway.http.chat_answer import ChatAnswer
from services.gateway.http.chat_body import ChatBody
from services.gateway.http.completion_answer import CompletionAnswer
from services.gateway.http.completion_body import CompletionBody
from services.gateway.http.connection import ResponseControl
from shared.generation import Delta

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

HEAD = Head("cmpl-1", 1, '"text":"" and "content":""', "fp_1")
"""A model of the worst name."""
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1)
NO_FINISH = {"logprobs": None, "finish_reason": None, "stop_reason": None}


def parsed(event: bytes) -> Any:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2, "a line more would be another field of the event"
    return json.loads(event[len(b"data: ") :])


@given(TEXTS, TEXTS, st.booleans())
def test_text_of_a_completion(first: str, second: str, usage: bool) -> None:
    body = CompletionBody.model_validate(
        {"prompt": "a", "stream": True, "n": 2, "stream_options": {"include_usage": usage}}
    )
    answer = CompletionAnswer(HEAD, body)
    for index, text in ((1, first), (0, second), (1, second)):
        assert parsed(answer.events(Delta(text, (1,), choice=index))) == {
            **HEAD.fields("text_completion"),
            "choices": [{"index": index, "text": text, **NO_FINISH}],
            **({"usage": None} if usage else {}),
        }
    assert answer.events(Delta("", (1,))) == b"", "a token without text is no news"


@given(TEXTS, TEXTS, st.booleans())
def test_text_of_a_chat(first: str, second: str, usage: bool) -> None:
    message = {"role": "user", "content": "a"}
    body = ChatBody.model_validate(
        {"messages": [message], "stream": True, "n": 2, "stream_options": {"include_usage": usage}}
    )
    answer = ChatAnswer(HEAD, body)
    for index, text in ((1, first), (0, second), (1, second)):
        assert parsed(answer.events(Delta(text, (1,), choice=index))) == {
            **HEAD.fields("chat.completion.chunk"),
            "choices": [{"index": index, "delta": {"content": text}, **NO_FINISH}],
            **({"usage": None} if usage else {}),
        }
    assert answer.events(Delta("", (1,))) == b"", "a token without text is no news"


def cycle(**fields: Any) -> tuple[RequestResponseCycle, list[bytes]]:
    """A response under way, and what is written of it."""
    written: list[bytes] = []
    usual = {
        "chunked_encoding": True,
        "disconnected": False,
        "flow": SimpleNamespace(write_paused=False),
        "transport": SimpleNamespace(write=written.append),
    }
    return cast("RequestResponseCycle", SimpleNamespace(**usual | fields)), written


def test_a_part_of_the_body_is_one_chunk() -> None:
    response, written = cycle()
    assert ResponseControl(response).write(b"data: 17 bytes..\n")
    assert written == [b"11\r\ndata: 17 bytes..\n\r\n"]


@pytest.mark.parametrize(
    "fields",
    [
        {"flow": SimpleNamespace(write_paused=True)},
        {"disconnected": True},
        {"chunked_encoding": False},
        {"chunked_encoding": None},
    ],
    ids=["slow-reader", "gone", "no-chunks", "no-head-yet"],
)
def test_what_cannot_be_written_now_is_left(fields: dict[str, Any]) -> None:
    response, written = cycle(**fields)
    assert not ResponseControl(response).write(b"data")
    assert written == []
    assert not ResponseControl().write(b"data"), "under another server than ours"
