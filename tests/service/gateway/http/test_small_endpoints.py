"""``/tokenize``, ``/detokenize``, ``/v1/models``, ``/health``, ``/ready``, ``/version``."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest

from shared.generation import ChatMessage, ChatRequest, Tool

if TYPE_CHECKING:
    from tests.service.gateway.http.conftest import RunningFront

USER = {"role": "user", "content": "x"}


async def test_texts_are_tokenized(front: RunningFront) -> None:
    for special, tokens in ((None, [257, 97, 98]), (True, [257, 97, 98]), (False, [97, 98])):
        response = await front.post("/tokenize", {"prompt": "ab", "add_special_tokens": special})
        assert response.json() == {"count": len(tokens), "max_model_len": 64, "tokens": tokens, "token_strs": None}
    assert (await front.post("/tokenize", {"prompt": ""})).json()["tokens"] == [257]


async def test_conversations_are_tokenized(front: RunningFront) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [USER], "tools": [tool], "continue_final_message": True, "add_generation_prompt": False}
    assert (await front.post("/tokenize", body)).json()["tokens"] == [1, 2, 3]
    assert front.generation.conversation == ChatRequest(
        [ChatMessage("user", "x")], tools=(Tool("f"),), continue_final_message=True
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": [USER]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": [USER], "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": [{"role": "banana"}]}, "messages[0].role"),
        ({"prompt": "x", "return_token_strs": True}, "return_token_strs"),
        ({"prompt": "x", "nope": 1}, "nope"),
    ],
)
async def test_what_cannot_be_tokenized(front: RunningFront, body: dict[str, Any], param: str) -> None:
    assert (await front.refused("/tokenize", body))["param"] == param


async def test_ids_become_text(front: RunningFront) -> None:
    assert (await front.post("/detokenize", {"tokens": [97, 98]})).json() == {"prompt": "ab"}
    assert (await front.refused("/detokenize", {"tokens": ["a"]}))["param"] == "tokens"
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": []})):
        assert (await front.post(path, body | {"model": "other"})).status_code == 404


async def test_the_model_is_listed(front: RunningFront) -> None:
    listed = (await front.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    [card] = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("synthetic:", "model", 64)
    assert card["vocab_size"] == front.generation.info.engine.vocab_size
    assert (await front.client.get("/v1/models/synthetic:")).json() == card
    assert (await front.client.get("/v1/models/synthetic%3A")).json() == card
    other = await front.client.get("/v1/models/a/b")
    assert other.status_code == 404
    assert other.json()["error"]["code"] == "model_not_found"


async def test_probes(front: RunningFront) -> None:
    for path in ("/health", "/ready"):
        assert (await front.client.get(path)).json() == {"status": "ok", "reason": None}
        head = await front.client.head(path)
        assert (head.status_code, head.content) == (200, b"")
    assert (await front.client.get("/version")).json() == {"version": version("orca-mesh")}
