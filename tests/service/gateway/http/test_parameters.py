"""Parameters of both endpoints: what they become, and which are refused by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from shared.generation import GenerateOptions, Guidance, GuidanceKind
from tests.fakes.fake_generation import last

if TYPE_CHECKING:
    from tests.service.gateway.http.conftest import RunningFront

PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}
both = pytest.mark.parametrize("path", PATHS)


async def options_of(front: RunningFront, path: str, **body: Any) -> GenerateOptions:
    """What generation gets for a body that is fine."""
    front.generation.answer = [last("y")]
    response = await front.post(path, PATHS[path] | body)
    assert response.status_code == 200, response.text
    return (await front.generation.call()).request.options


@both
async def test_every_option(front: RunningFront, path: str) -> None:
    options = await options_of(
        front,
        path,
        model="synthetic:",
        max_tokens=5,
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        seed=-1,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        logit_bias={"5": -100, "300": 0.5},
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        ignore_eos=True,
        min_tokens=3,
        n=1,
        timeout=2.5,
        user="u",
    )
    assert options == GenerateOptions(
        max_tokens=5,
        temperature=0.0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        seed=(1 << 64) - 1,
        presence_penalty=1.0,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        logit_bias={5: -100.0, 300: 0.5},
        stop=("a", "b"),
        stop_token_ids=(1, 2),
        ignore_eos=True,
        min_tokens=3,
        timeout_s=2.5,
    )


@both
async def test_null_is_the_default(front: RunningFront, path: str) -> None:
    schema = (await front.client.get("/openapi.json")).json()["components"]["schemas"]
    model = schema["CompletionBody" if path == "/v1/completions" else "ChatBody"]
    nulls = {name: None for name in model["properties"] if name not in model["required"]}
    assert len(nulls) > 40
    assert await options_of(front, path, **nulls) == GenerateOptions()


async def test_one_stop_is_a_list_of_one(front: RunningFront) -> None:
    assert (await options_of(front, "/v1/completions", stop="ab")).stop == ("ab",)
    assert (await options_of(front, "/v1/completions", stop=[])).stop == ()


async def test_top_k_of_vllm_that_keeps_all(front: RunningFront) -> None:
    assert (await options_of(front, "/v1/completions", top_k=-1)).top_k == 0


SCHEMA = {"type": "object", "properties": {"é": {"const": 1}}}
TEXT = '{"type":"object","properties":{"é":{"const":1}}}'


@both
@pytest.mark.parametrize(
    ("body", "guidance"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Guidance(GuidanceKind.JSON_OBJECT)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            Guidance(GuidanceKind.JSON_SCHEMA, TEXT),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            Guidance(GuidanceKind.JSON_OBJECT),
        ),
        ({"guided_json": SCHEMA}, Guidance(GuidanceKind.JSON_SCHEMA, TEXT)),
        ({"guided_json": TEXT}, Guidance(GuidanceKind.JSON_SCHEMA, TEXT)),
        ({"guided_regex": "a+"}, Guidance(GuidanceKind.REGEX, "a+")),
        ({"guided_choice": ["a", "b"]}, Guidance(GuidanceKind.CHOICES, choices=("a", "b"))),
        ({"guided_grammar": "start: x"}, Guidance(GuidanceKind.GRAMMAR, "start: x")),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json": SCHEMA}}, Guidance(GuidanceKind.JSON_SCHEMA, TEXT)),
        ({"structured_outputs": {"json_object": True}}, Guidance(GuidanceKind.JSON_OBJECT)),
        ({"structured_outputs": {"regex": "a+"}}, Guidance(GuidanceKind.REGEX, "a+")),
        ({"structured_outputs": {"choice": ["a"]}}, Guidance(GuidanceKind.CHOICES, choices=("a",))),
        ({"structured_outputs": {"grammar": "start: x"}}, Guidance(GuidanceKind.GRAMMAR, "start: x")),
    ],
)
async def test_guidance(front: RunningFront, path: str, body: dict[str, Any], guidance: Guidance | None) -> None:
    assert (await options_of(front, path, **body)).guidance == guidance


def each(field: str, values: list[Any]) -> list[tuple[str, Any]]:
    return [(field, value) for value in values]


WRONG: list[tuple[str, Any]] = [
    *each("max_tokens", ["5", 1.5, 5.0, True, [], {}]),
    *each("temperature", ["0", True, [1]]),
    ("top_p", "1"),
    *each("top_k", [1.0, "1"]),
    *each("seed", [1.5, 1 << 64, -(1 << 63) - 1, 1 << 70]),
    *each("n", [0, -1, 129, 1.0, "1"]),
    *each("stop", [5, [5], {}, ["a", None]]),
    *each("stop_token_ids", [[1.0], ["12"], 5, [True]]),
    *each("logit_bias", [[], {"5": 1, "05": 2}, {"x": 1}, {"1.0": 1}, {"": 1}, {"²": 1}, {"9" * 30: 1}]),
    ("logit_bias.5", {"5": "1"}),
    *each("stream", [1, "true"]),
    ("stream_options", True),
    ("stream_options.include_usage", {"include_usage": 1}),
    ("stream_options.include_obfuscation", {"include_obfuscation": True}),
    ("response_format", "json_object"),
    ("response_format.type", {"type": "xml"}),
    ("response_format.json_schema", {"type": "json_schema"}),
    ("response_format.json_schema", {"type": "text", "json_schema": {"name": "n"}}),
    ("response_format.json_schema.name", {"type": "json_schema", "json_schema": {}}),
    ("guided_choice", "a"),
    ("guided_json", 5),
    ("structured_outputs.json", {"json": 5}),
    ("structured_outputs.structural_tag", {"structural_tag": "x"}),
    ("timeout", "5"),
    ("user", 5),
    ("ignore_eos", 1),
    ("model", 5),
]


@both
@pytest.mark.parametrize(("field", "value"), WRONG)
async def test_wrong_types_are_refused_by_name(front: RunningFront, path: str, field: str, value: Any) -> None:
    error = await front.refused(path, PATHS[path] | {field.partition(".")[0]: value})
    assert error["param"] == field
    assert field.partition(".")[0] in error["message"]


@both
@pytest.mark.parametrize(
    "body",
    [
        {"guided_regex": "a", "guided_choice": ["a"]},
        {"response_format": {"type": "json_object"}, "guided_json": {}},
        {"structured_outputs": {"regex": "a", "grammar": "start: x"}},
    ],
)
async def test_guidance_is_of_one_kind(front: RunningFront, path: str, body: dict[str, Any]) -> None:
    assert "exclude each other" in (await front.refused(path, PATHS[path] | body))["message"]


@both
async def test_unknown_fields_are_refused_as_openai_does(front: RunningFront, path: str) -> None:
    error = await front.refused(path, PATHS[path] | {"temprature": 1})
    assert error["message"] == "Unrecognized request argument supplied: temprature"
    assert error["param"] == "temprature"


@pytest.mark.parametrize(
    ("path", "field", "fine", "refused"),
    [
        ("/v1/completions", "suffix", "", "x"),
        ("/v1/completions", "bad_words", [], ["x"]),
        ("/v1/completions", "skip_special_tokens", True, False),
        ("/v1/completions", "use_beam_search", False, True),
        ("/v1/chat/completions", "modalities", ["text"], ["text", "audio"]),
        ("/v1/chat/completions", "audio", None, {"voice": "alloy", "format": "wav"}),
        ("/v1/chat/completions", "prediction", None, {"type": "content", "content": "x"}),
        ("/v1/chat/completions", "web_search_options", None, {}),
        ("/v1/chat/completions", "functions", None, [{"name": "f"}]),
        ("/v1/chat/completions", "function_call", None, "auto"),
        ("/v1/chat/completions", "reasoning_effort", "none", "high"),
        ("/v1/chat/completions", "verbosity", "medium", "low"),
        ("/v1/chat/completions", "store", False, True),
        ("/v1/chat/completions", "store", False, 0),
        ("/v1/chat/completions", "service_tier", "auto", "flex"),
        ("/v1/chat/completions", "metadata", {"a": "b"}, {"a": 1}),
        ("/v1/chat/completions", "chat_template", None, "{{ messages }}"),
    ],
)
async def test_what_is_not_supported_is_refused_unless_it_asks_for_nothing(
    front: RunningFront, path: str, field: str, fine: Any, refused: Any
) -> None:
    assert await options_of(front, path, **{field: fine}) == GenerateOptions()
    error = await front.refused(path, PATHS[path] | {field: refused})
    assert (error["param"] or "").partition(".")[0] == field
    assert field in error["message"]


@both
async def test_another_model_is_not_there(front: RunningFront, path: str) -> None:
    response = await front.post(path, PATHS[path] | {"model": "gpt-4o"})
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": "The model `gpt-4o` does not exist; this gateway serves `synthetic:`",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


@both
@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e400", '"\\ud800"', "01", "[1,]", "[" * 2000])
async def test_json_is_strict(front: RunningFront, path: str, value: str) -> None:
    body = json.dumps(PATHS[path])[:-1] + f', "temperature": {value}}}'
    response = await front.client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"
