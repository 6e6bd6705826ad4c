"""Tools as clients send them, and what a model that is made to call them writes, whatever its notation."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from services.gateway.guidance import guidance_grammar
from services.gateway.served_model import ModelText
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.tool_calls import HERMES, LLAMA3, MISTRAL
from services.gateway.tools import parse_tools, tool_use
from shared.errors import InvalidRequestError
from shared.generation import (
    ChatMessage,
    ChatRequest,
    GenerateOptions,
    Guidance,
    GuidanceKind,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from shared.text.byte_tokenizer import ByteTokenizer
from tests.guided_walk import GuidedWalker
from tests.vocabularies import KINDS, load_vocabulary

if TYPE_CHECKING:
    from services.gateway.tools import ToolUse
    from shared.text.tokenizer import Tokenizer

TEMPLATES = {path.stem: path.read_text() for path in (Path(__file__).parent / "text" / "templates").glob("*.jinja")}
FORMS = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL}

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9, "description": "how many"}},
}
TOOLS = (
    Tool("get_weather", "Tells the weather", json.dumps(WEATHER)),
    Tool("now"),
    Tool("roll.dice-2", "", '{"properties": {"sides": {"enum": [4, 6, 20], "default": 6}}, "required": ["sides"]}'),
)
SCHEMAS = {tool.name: tool.parameters for tool in parse_tools(TOOLS)}


def _request(tools: tuple[Tool, ...] = TOOLS, choice: ToolChoice | None = None, **options: Any) -> ChatRequest:
    return ChatRequest(
        [ChatMessage("user", "hi")], GenerateOptions(**options), tools=tools, tool_choice=choice or ToolChoice()
    )


def _text(template: str, tokenizer: Tokenizer | None = None) -> ModelText:
    return ModelText(tokenizer or ByteTokenizer(300), {"default": ChatTemplate(template, bos_token="", eos_token="")})


def _use(template: str, request: ChatRequest, tokenizer: Tokenizer | None = None) -> ToolUse:
    use = tool_use(request, _text(template, tokenizer))
    assert use is not None
    return use


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_vocabulary(request.param, tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def walker(tokenizer: Tokenizer) -> GuidedWalker:
    return GuidedWalker(tokenizer)


@pytest.mark.parametrize("template", FORMS)
@pytest.mark.parametrize("choice", [ToolChoice(ToolMode.REQUIRED), ToolChoice(ToolMode.NAMED, "get_weather")])
def test_a_model_that_must_call_calls(
    tokenizer: Tokenizer, walker: GuidedWalker, template: str, choice: ToolChoice
) -> None:
    use = _use(TEMPLATES[template], _request(choice=choice), tokenizer)
    assert use.form is FORMS[template]
    assert use.guidance is not None
    grammar = guidance_grammar(use.guidance)
    num_calls = set()
    for seed in range(6):
        ids = walker.write(grammar, seed, num_wild=150)
        calls = _calls(use, tokenizer, ids)
        num_calls.add(len(calls))
        for call in calls:
            if choice.mode is ToolMode.NAMED:
                assert call.name == choice.name
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        if template != "llama3" or len(calls) == 1:
            history = [ChatMessage("user", "hi"), ChatMessage("assistant", tool_calls=tuple(calls))]
            rendered = _text(TEMPLATES[template]).chat_template(with_tools=True).render(history)
            assert _meaning(_parse(use, rendered)) == _meaning(calls)
    assert num_calls == {1} if choice.mode is ToolMode.NAMED else max(num_calls) > 1


@pytest.mark.parametrize("template", FORMS)
def test_a_model_that_must_call_once_calls_once(tokenizer: Tokenizer, walker: GuidedWalker, template: str) -> None:
    request = dataclasses.replace(_request(choice=ToolChoice(ToolMode.REQUIRED)), parallel_tool_calls=False)
    use = _use(TEMPLATES[template], request, tokenizer)
    assert use.only_one
    assert use.guidance is not None
    grammar = guidance_grammar(use.guidance)
    all_calls = dataclasses.replace(use, only_one=False)
    for seed in range(6):
        assert len(_calls(all_calls, tokenizer, walker.write(grammar, seed, num_wild=150))) == 1


def _shown(use: ToolUse, tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer, continues=True, markers=use.markers)
    return detokenizer.push(ids).text + detokenizer.finish().text


def _calls(use: ToolUse, tokenizer: Tokenizer, ids: list[int]) -> list[ToolCall]:
    """The calls in what a model wrote, which must be nothing but calls."""
    shown = _shown(use, tokenizer, ids)
    parser = use.parser()
    assert parser.push(shown)[0] + parser.finish()[0] == ""
    return _parse(use, shown)


def _parse(use: ToolUse, text: str) -> list[ToolCall]:
    parser = use.parser()
    calls: list[ToolCall] = []
    for delta in [*parser.push(text)[1], *parser.finish()[1]]:
        if delta.index == len(calls):
            calls.append(ToolCall(delta.id, delta.name, delta.arguments))
        else:
            calls[-1] = dataclasses.replace(calls[-1], arguments=calls[-1].arguments + delta.arguments)
    assert calls
    return calls


def _meaning(calls: list[ToolCall]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("template", FORMS)
def test_markers_that_are_special_tokens_are_seen(tokenizer: Tokenizer, template: str) -> None:
    use = _use(TEMPLATES[template], _request(), tokenizer)
    special = {text: token_id for token_id, text in tokenizer.special_tokens.items()}
    assert use.markers == {special[text]: text for text in (use.form.opening, use.form.closing) if text in special}
    member = use.form.arguments
    call = f'{{"name": "now", "{member}": {{}}}}'
    text = use.form.opening + (f"[{call}]" if use.form.is_list else call) + use.form.closing
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert set(use.markers) <= {*ids, *use.markers}
    (found,) = _calls(use, tokenizer, ids)
    assert (found.name, found.arguments) == ("now", "{}")


def test_ids_are_what_the_models_templates_take() -> None:
    for template, pattern in (("hermes", "call_[0-9a-f]{24}"), ("llama3", "call_[0-9a-f]{24}"), ("mistral", ".{9}")):
        use = _use(TEMPLATES[template], _request())
        one, other = use._new_id(), use._new_id()
        assert re.fullmatch(pattern, one)
        assert one != other
        if template == "mistral":
            history = [ChatMessage("user", "hi"), ChatMessage("assistant", tool_calls=(ToolCall(one, "now", "{}"),))]
            assert one in _text(TEMPLATES[template]).chat_template(with_tools=True).render(history)


def test_tools_are_shown_as_transformers_shows_them() -> None:
    use = _use(TEMPLATES["hermes"], _request())
    assert use.guidance is None
    assert use.descriptions() == [
        {
            "type": "function",
            "function": {"name": "get_weather", "description": "Tells the weather", "parameters": WEATHER},
        },
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
        {"type": "function", "function": {"name": "roll.dice-2", "parameters": json.loads(TOOLS[2].parameters)}},
    ]


def test_the_template_for_tools_is_taken_where_there_is_one() -> None:
    plain, for_tools = ChatTemplate(TEMPLATES["chatml"]), ChatTemplate(TEMPLATES["hermes"])
    text = ModelText(ByteTokenizer(300), {"default": plain, "tool_use": for_tools})
    assert text.chat_template(with_tools=True) is for_tools
    assert text.chat_template(with_tools=False) is plain
    use = tool_use(_request(), text)
    assert use is not None
    assert use.form is HERMES


@pytest.mark.parametrize("request_", [_request(()), _request(choice=ToolChoice(ToolMode.NONE))])
def test_a_request_may_use_no_tools(request_: ChatRequest) -> None:
    assert tool_use(request_, _text(TEMPLATES["chatml"])) is None


@pytest.mark.parametrize(
    ("template", "request_", "message"),
    [
        ("chatml", _request(), "does not support tools"),
        ("chatml", _request(choice=ToolChoice(ToolMode.REQUIRED)), "does not support tools"),
        ("hermes", _request((), ToolChoice(ToolMode.REQUIRED)), "there are no tools"),
        ("hermes", _request((), ToolChoice(ToolMode.NAMED, "now")), "there are no tools"),
        ("hermes", _request(choice=ToolChoice(ToolMode.NAMED, "then")), "'then', which is none of the tools"),
        ("hermes", _request(guidance=Guidance(GuidanceKind.JSON_OBJECT)), "guidance leaves no room"),
        (
            "hermes",
            _request((Tool("now", parameters=json.dumps({"x": "y" * 70_000})),), ToolChoice(ToolMode.REQUIRED)),
            "send fewer or smaller ones",
        ),
        ("hermes", _request((Tool(""),)), r"tools\[0\] has the name ''"),
        ("hermes", _request((Tool("now"), Tool("a b"))), r"tools\[1\] has the name 'a b'"),
        ("hermes", _request((Tool("é"),)), r"tools\[0\] has the name"),
        ("hermes", _request((Tool("n" * 65),)), "1 to 64"),
        ("hermes", _request((Tool("now"), Tool("now"))), "of another tool"),
        ("hermes", _request(tuple(Tool(f"t{n}") for n in range(129))), "129 tools"),
        ("hermes", _request((Tool("now", parameters="{"),)), r"parameters of tools\[0\] are not JSON"),
        ("hermes", _request((Tool("now", parameters="[" * 99_999),)), "not JSON"),
        *(
            (
                "hermes",
                _request((Tool("now", parameters='{"a":' * depth + "{}" + "}" * depth),)),
                "nested more than 256",
            )
            for depth in range(900, 1000, 7)
        ),
        ("hermes", _request((Tool("now", parameters="[]"),)), "no JSON schema"),
        ("hermes", _request((Tool("now", parameters='{"type": "string"}'),)), 'of type "object"'),
        ("hermes", _request((Tool("now", parameters='{"properties": []}'),)), 'of type "object"'),
    ],
)
def test_what_cannot_be_used_is_refused(template: str, request_: ChatRequest, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        tool_use(request_, _text(TEMPLATES[template]))
    assert refusal.value.field in {"tools", "tool_choice"}


def test_an_unknown_notation_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="notation that this gateway cannot read"):
        tool_use(_request(), _text("{{ tools }}"))


def test_a_model_without_template_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tool_use(_request(), ModelText(ByteTokenizer(300), {}))
