"""The tools of a request: what the model is shown of them, what it is made to write, and how its calls are found.

Knows what clients send and which notation a model's chat template teaches (`text.tool_calls`). Does not know HTTP.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from services.gateway.guidance import JSON_OPTIONS, MAX_GUIDANCE_BYTES
from services.gateway.text.json_text import parse_json
from services.gateway.text.tool_calls import MISTRAL, ToolCallParser, detect_format
from shared.errors import InvalidRequestError
from shared.generation import Guidance, GuidanceKind, ToolMode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from services.gateway.served_model import ModelText
    from services.gateway.text.chat_template import ChatTemplate
    from services.gateway.text.tool_calls import ToolCallFormat
    from shared.generation import ChatRequest, Tool, ToolChoice
    from shared.text.tokenizer import Tokenizer

__all__ = ["FunctionTool", "ToolUse", "parse_tools", "tool_guidance", "tool_use"]

MAX_TOOLS = 128
MAX_CALLS = 16
"""That a model can be made to write at once."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A tool that can be shown to a model."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments, which are an object."""

    def as_mapping(self) -> dict[str, Any]:
        """As chat templates read it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the tools of one request are used."""

    tools: tuple[FunctionTool, ...]
    form: ToolCallFormat
    markers: Mapping[int, str]
    """Special tokens that `parser` must see in the text of the output, and how they are spelled there."""
    guidance: Guidance | None
    """What forces a call; None leaves it to the model."""
    only_one: bool = False
    """The output ends with its first call."""

    def descriptions(self) -> list[dict[str, Any]]:
        """For `ChatTemplate.render`."""
        return [tool.as_mapping() for tool in self.tools]

    def parser(self) -> ToolCallParser:
        """For the text of one output."""
        return ToolCallParser(self.form, {tool.name for tool in self.tools}, self._new_id, only_one=self.only_one)

    def _new_id(self) -> str:
        # Mistral's templates refuse any other length when the call comes back.
        return secrets.token_hex(5)[:9] if self.form is MISTRAL else f"call_{secrets.token_hex(12)}"


def tool_use(request: ChatRequest, text: ModelText) -> ToolUse | None:
    """How ``request`` uses tools, None where it does not.

    Raises:
        InvalidRequestError: a tool or the choice is not valid, or this model's template does not show tools.
    """
    choice = request.tool_choice
    tools = parse_tools(request.tools)
    if not tools:
        if choice.mode in {ToolMode.REQUIRED, ToolMode.NAMED}:
            raise InvalidRequestError("tool_choice asks for a call, but there are no tools: send some", field="tools")
        return None
    if choice.mode is ToolMode.NAMED and choice.name not in {tool.name for tool in tools}:
        raise InvalidRequestError(f"tool_choice names {choice.name!r}, which is none of the tools", field="tool_choice")
    if choice.mode is ToolMode.NONE:
        return None
    if request.options.guidance is not None:
        raise InvalidRequestError(
            "guidance leaves no room for calls of tools: leave one of them out, or send tool_choice none", field="tools"
        )
    form = _format_of(text.chat_template(with_tools=True))
    tokenizer = text.tokenizer
    markers = {
        token_id: spelling
        for token_id, spelling in tokenizer.special_tokens.items()
        if spelling in {form.opening, form.closing}
    }
    only_one = not request.parallel_tool_calls
    guidance = tool_guidance(tools, choice, form, tokenizer, max_calls=1 if only_one else MAX_CALLS)
    return ToolUse(tools, form, markers, guidance, only_one)


def parse_tools(tools: Sequence[Tool]) -> tuple[FunctionTool, ...]:
    """Check what a client sent.

    Raises:
        InvalidRequestError: a name or a schema is not valid; it says which.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"there are {len(tools)} tools; at most {MAX_TOOLS} are allowed", field="tools")
    parsed: dict[str, FunctionTool] = {}
    for index, tool in enumerate(tools):
        if not _NAME.fullmatch(tool.name):
            raise InvalidRequestError(
                f"tools[{index}] has the name {tool.name!a}; a name has 1 to 64 of the characters a-z, A-Z, 0-9, _, . "
                "and -",
                field="tools",
            )
        if tool.name in parsed:
            raise InvalidRequestError(f"tools[{index}] has the name {tool.name!r} of another tool", field="tools")
        parsed[tool.name] = FunctionTool(tool.name, tool.description, _parameters(tool, f"tools[{index}]"))
    return tuple(parsed.values())


def _parameters(tool: Tool, name: str) -> dict[str, Any]:
    if not tool.parameters:
        return {"type": "object", "properties": {}}
    try:
        schema = parse_json(tool.parameters)
    except ValueError as error:
        raise InvalidRequestError(f"the parameters of {name} are not JSON ({error})", field="tools") from error
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"the parameters of {name} are no JSON schema: send an object", field="tools")
    if schema.get("type", "object") != "object" or not isinstance(schema.get("properties", {}), dict):
        raise InvalidRequestError(
            f'the parameters of {name} must be a JSON schema of type "object", with an object of properties',
            field="tools",
        )
    return schema


def _format_of(template: ChatTemplate) -> ToolCallFormat:
    if not template.knows_tools:
        raise InvalidRequestError(
            "this model's chat template does not support tools: leave them out, or use a model that knows them",
            field="tools",
        )
    form = detect_format(template.text)
    if form is None:
        raise InvalidRequestError(
            "this model's chat template has tools called in a notation that this gateway cannot read; it reads those "
            "of Hermes and Qwen (<tool_call>), Llama 3 (JSON with parameters) and Mistral ([TOOL_CALLS] with a list)",
            field="tools",
        )
    return form


def tool_guidance(
    tools: Sequence[FunctionTool],
    choice: ToolChoice,
    form: ToolCallFormat,
    tokenizer: Tokenizer,
    *,
    max_calls: int = MAX_CALLS,
) -> Guidance | None:
    """What forces a model to call one of ``tools``, in its own notation; None where the choice forces nothing.

    REQUIRED allows up to ``max_calls``, NAMED one of the tool that is named. White space is as models are trained on
    it.

    Raises:
        InvalidRequestError: it becomes too large.
    """
    if choice.mode is ToolMode.NAMED:
        tools, max_calls = [tool for tool in tools if tool.name == choice.name], 1
    elif choice.mode is not ToolMode.REQUIRED:
        return None
    opening, closing = (_terminal(marker, tokenizer) for marker in (form.opening, form.closing))
    separator = json.dumps(", " if form.is_list else f"{form.separators} " if form.is_bare else "\n")
    calls = "call" if max_calls == 1 else f"call ({separator} call){{0,{max_calls - 1}}}"
    lines = [
        f'start: {opening} " "? "[" {calls} "]"' if form.is_list else f"start: {calls}",
        f'call: {opening} "\\n" function "\\n" {closing}' if form.closing else "call: function",
    ]
    lines.append("function: " + " | ".join(f"function_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        head = json.dumps(f'{{"name": "{tool.name}", "{form.arguments}": ')
        lines.append(f'function_{index}: {head} arguments_{index} "}}"')
        schema = {"type": "object"} | dict(tool.parameters) | {"x-guidance": JSON_OPTIONS}
        lines.append(f"arguments_{index}: %json {json.dumps(schema)}")
    grammar = "\n".join(lines)
    if len(grammar) > MAX_GUIDANCE_BYTES:  # ASCII, as JSON is written here
        raise InvalidRequestError(
            f"the tools make a grammar of {len(grammar)} bytes; at most {MAX_GUIDANCE_BYTES} are allowed for a call to "
            "be forced: send fewer or smaller ones",
            field="tools",
        )
    return Guidance(GuidanceKind.GRAMMAR, grammar)


def _terminal(marker: str, tokenizer: Tokenizer) -> str:
    """A marker in a grammar: the special token that it is, or its text."""
    token_id = next((token_id for token_id, text in tokenizer.special_tokens.items() if text == marker), None)
    return json.dumps(marker) if token_id is None else f"<[{token_id}]>"
