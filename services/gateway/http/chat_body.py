"""The body of ``POST /v1/chat/completions``."""

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from services.gateway.admission import ROLES
from services.gateway.http.errors import HttpError
from services.gateway.http.fields import Body, Items, JsonSchema, Only, OnlyFalse, OnlyNull, OnlyTrue, limited
from services.gateway.http.generation_body import GenerationBody
from shared.generation import ChatMessage, ChatRequest, Tool, ToolCall, ToolChoice, ToolMode

__all__ = ["ROLES", "ChatBody", "MessageBody", "ToolBody", "continues"]

_FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
_MODES = {"auto": ToolMode.AUTO, "none": ToolMode.NONE, "required": ToolMode.REQUIRED}


def _content(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "it must be a text or a list of parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise PydanticCustomError("content", "each part must be an object with a type")
        if kind not in {"text", "refusal"}:
            raise PydanticCustomError(
                "content", "it has a part of type {kind}; this model reads text only", {"kind": repr(kind[:40])}
            )
        if set(part) != {"type", kind} or not isinstance(part[kind], str):
            raise PydanticCustomError("content", "a part of type {kind} has one text, {kind}", {"kind": kind})
        texts.append(part[kind])
    return "\n".join(texts)


_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
Content = Annotated[
    str,
    PlainValidator(_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}]}),
]
"""A text, or a list of text parts, which are joined by line breaks."""


def _tool_choice(value: Any) -> ToolChoice | None:
    if value is None:
        return None
    if isinstance(value, str) and value in _MODES:
        return ToolChoice(_MODES[value])
    if isinstance(value, dict) and set(value) == {"type", "function"} and value["type"] == "function":
        function = value["function"]
        if isinstance(function, dict) and set(function) == {"name"} and isinstance(function["name"], str):
            return ToolChoice(ToolMode.NAMED, function["name"])
    raise PydanticCustomError(
        "tool_choice",
        "it must be 'none', 'auto', 'required', or an object with the type 'function' and the function's name",
    )


_NAMED_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}
ToolChoiceField = Annotated[
    ToolChoice | None,
    PlainValidator(_tool_choice),
    WithJsonSchema({"anyOf": [{"enum": list(_MODES)}, _NAMED_SCHEMA, {"type": "null"}]}),
]


class FunctionCallBody(Body):
    """A function that the model called."""

    name: str
    arguments: str
    """A JSON object, as text."""


class ToolCallBody(Body):
    """A call of a tool by the model."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCallBody
    index: Annotated[Any, Only(*range(128))] = None


class _Message(Body):
    """One turn of the conversation; what belongs to another role is accepted as null only."""

    name: str | None = None
    """Who speaks, where the model's template shows it."""
    tool_calls: OnlyNull = None
    tool_call_id: OnlyNull = None
    refusal: OnlyNull = None
    annotations: Annotated[Any, Only([])] = None
    audio: OnlyNull = None
    function_call: OnlyNull = None
    reasoning: OnlyNull = None
    reasoning_content: OnlyNull = None


class InstructionBody(_Message):
    """What holds for the whole conversation."""

    role: Literal["system", "developer"]
    """"developer" is taken as "system"."""
    content: Content

    def message(self) -> ChatMessage:
        """Return the turn."""
        return ChatMessage("system", self.content, name=self.name or "")


class UserBody(_Message):
    """What the user says."""

    role: Literal["user"]
    content: Content

    def message(self) -> ChatMessage:
        """Return the turn."""
        return ChatMessage("user", self.content, name=self.name or "")


class AssistantBody(_Message):
    """What the model said."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Items[ToolCallBody] | None = None
    refusal: str | None = None
    """Taken as the content where there is none."""

    def message(self) -> ChatMessage:
        """Return the turn."""
        calls = (ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ())
        return ChatMessage("assistant", self.content or self.refusal or "", tuple(calls), name=self.name or "")


class ToolAnswerBody(_Message):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    """Which call this answers."""

    def message(self) -> ChatMessage:
        """Return the turn."""
        return ChatMessage("tool", self.content, tool_call_id=self.tool_call_id, name=self.name or "")


MessageBody = Annotated[InstructionBody | UserBody | AssistantBody | ToolAnswerBody, Field(discriminator="role")]


class FunctionBody(Body):
    """A function that the model may call."""

    name: str = Field(pattern=_FUNCTION_NAME)
    description: str | None = None
    parameters: JsonSchema | None = None
    """Of its arguments."""
    strict: bool | None = None
    """Accepted either way."""


class ToolBody(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionBody

    def tool(self) -> Tool:
        """Return the tool."""
        function = self.function
        return Tool(function.name, function.description or "", function.parameters or "")


class ChatBody(GenerationBody):
    """A conversation to answer."""

    messages: Items[MessageBody]
    max_completion_tokens: int | None = limited(minimum=0)
    """Most output tokens; by default what is left of the context."""
    logprobs: bool | None = None
    """Give log probabilities of the tokens."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    """Give so many of the most likely ones, too; needs ``logprobs``."""
    tools: Items[ToolBody] | None = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None
    """False: at most one call, which ends the output."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """The output goes on with the last message, which is the assistant's, rather than answering it."""
    metadata: dict[str, str] | None = None
    """Accepted and ignored, and so are the next ones."""
    store: OnlyFalse = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    modalities: Annotated[Any, Only(["text"])] = None
    audio: OnlyNull = None
    prediction: OnlyNull = None
    web_search_options: OnlyNull = None
    functions: OnlyNull = None
    function_call: OnlyNull = None
    reasoning_effort: Annotated[Any, Only("none")] = None
    verbosity: Annotated[Any, Only("medium")] = None
    prompt_cache_retention: Annotated[Any, Only("in_memory", "in-memory")] = None
    prompt_cache_options: OnlyNull = None
    moderation: OnlyNull = None
    best_of: Annotated[Any, Only(1)] = None
    echo: OnlyFalse = None
    chat_template: OnlyNull = None
    chat_template_kwargs: Annotated[Any, Only({})] = None
    documents: Annotated[Any, Only([])] = None
    include_reasoning: OnlyTrue = None
    mm_processor_kwargs: OnlyNull = None

    def request(self, request_id: str) -> ChatRequest:
        """Return what is asked. Raises ``HttpError``."""
        self.check_delivery()
        if self.top_logprobs is not None and not self.logprobs:
            raise HttpError(400, "top_logprobs is allowed only when logprobs is true", param="top_logprobs")
        tools = tuple(tool.tool() for tool in self.tools or ())
        if self.tool_choice is not None and not tools and self.tool_choice.mode is not ToolMode.NONE:
            raise HttpError(400, "tool_choice is allowed only when tools are given", param="tool_choice")
        return ChatRequest(
            messages=[message.message() for message in self.messages],
            options=self.options(
                max_tokens=self._max_tokens(),
                num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
                best_of=None,
            ),
            tools=tools,
            tool_choice=self.tool_choice or ToolChoice(),
            continue_final_message=continues(self.add_generation_prompt, self.continue_final_message),
            request_id=request_id,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            return_prompt_token_ids=bool(self.return_token_ids),
        )

    def _max_tokens(self) -> int | None:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise HttpError(
                400,
                f"max_completion_tokens is {self.max_completion_tokens} and max_tokens, its older name, is "
                f"{self.max_tokens}: send one of them",
                param="max_completion_tokens",
            )
        return both.pop() if both else None


def continues(add_generation_prompt: bool | None, continue_final_message: bool | None) -> bool:
    """Return whether the last message is gone on with, as vLLM's two fields say it. Raises ``HttpError``."""
    if continue_final_message and add_generation_prompt:
        raise HttpError(
            400,
            "continue_final_message and add_generation_prompt exclude each other: choose one",
            param="continue_final_message",
        )
    if add_generation_prompt is False and not continue_final_message:
        raise HttpError(
            400,
            "add_generation_prompt false is supported with continue_final_message only",
            param="add_generation_prompt",
        )
    return bool(continue_final_message)
