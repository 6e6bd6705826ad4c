"""The OpenAPI document: whole, true, and without a word of elsewhere."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import jsonschema

from tests.fakes.fake_generation import last

if TYPE_CHECKING:
    from tests.service.gateway.http.conftest import RunningFront


async def test_every_reference_is_there_and_nothing_is_from_outside(front: RunningFront) -> None:
    response = await front.client.get("/openapi.json")
    document = response.json()
    assert document["openapi"] == "3.1.0"
    references = set(re.findall(r'"\$ref": ?"#/components/schemas/([^"]+)"', response.text))
    assert references <= set(document["components"]["schemas"])
    assert "http" not in {word.partition("://")[0] for word in re.findall(r"\w+://", response.text)}
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


async def test_it_knows_every_route_but_the_page_and_itself(front: RunningFront) -> None:
    document = (await front.client.get("/openapi.json")).json()
    for path, operations in document["paths"].items():
        for method in operations:
            headers = {"content-type": "application/json"}
            response = await front.client.request(method, path.replace("{model}", "synthetic:"), headers=headers)
            assert response.status_code in {200, 400}, f"{method} {path}"
    assert set(document["paths"]) >= {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/ready"}
    summaries = [operation["summary"] for operations in document["paths"].values() for operation in operations.values()]
    assert all(summaries)


async def test_what_it_says_of_requests_is_what_is_checked(front: RunningFront) -> None:
    document = (await front.client.get("/openapi.json")).json()
    front.generation.answer = [last("y")]
    schema = {"$ref": "#/components/schemas/CompletionBody", "components": document["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    bodies: list[dict[str, Any]] = [
        {"prompt": "x"},
        {"prompt": ["x"], "stop": "a", "suffix": "", "seed": -5, "logprobs": 5},
        {"prompt": [1, 2], "stop": ["a"], "stream_options": None, "skip_special_tokens": True},
        {},
        {"prompt": []},
        {"prompt": "x", "suffix": "y"},
        {"prompt": "x", "n": 0},
        {"prompt": "x", "logprobs": 6},
        {"prompt": "x", "stop": 5},
        {"prompt": "x", "unknown": 1},
        {"prompt": "x", "temperature": "1"},
        {"prompt": "x", "skip_special_tokens": False},
    ]
    for body in bodies:
        status = (await front.post("/v1/completions", body)).status_code
        assert (status == 200) == validator.is_valid(body), body
