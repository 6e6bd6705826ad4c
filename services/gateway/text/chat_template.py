"""A conversation as the one text that a chat model was trained on: the model's own Jinja template.

Knows how transformers sets Jinja up (`transformers.utils.chat_template_utils`): the same template and messages give the
same text. Does not know tokens, nor the shape of any API.

Templates come with models, so they run in Jinja's sandbox: they see no attribute that begins with an underscore, change
nothing of the caller's, and ranges and the length of the result are bounded. A malicious one can still waste time and
memory: a template is taken from whoever runs the gateway, never from a request.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InvalidRequestError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jinja2.parser import Parser

__all__ = ["MAX_PROMPT_CHARACTERS", "ChatTemplate"]

MAX_PROMPT_CHARACTERS = 1 << 24
"""Longest text that a template may give; far above any context length."""

_MAX_TEMPLATE_CHARACTERS = 1 << 20
_MAX_RANGE = 10_000
_FINAL_MESSAGE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""transformers' mark for the end of the message to continue; the space at its end shows whether a template trims."""


class ChatTemplate:
    """One model's template, compiled once.

    Args:
        template: the Jinja text, None for a model that came without one.
        bos_token: what ``bos_token`` is in the template; None leaves it undefined.
        eos_token: the same for ``eos_token``.
        now: the local time, for templates that state the date.
        max_characters: longest text that `render` may give.

    Raises:
        ModelError: the template is no valid Jinja.
    """

    def __init__(
        self,
        template: str | None,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
        max_characters: int = MAX_PROMPT_CHARACTERS,
    ) -> None:
        special = {"bos_token": bos_token, "eos_token": eos_token}
        self._special_tokens = {name: token for name, token in special.items() if token is not None}
        self._max_characters = max_characters
        self._template = None if template is None else _compile(template, now)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt for ``messages``, to be encoded without adding special tokens.

        Args:
            messages: each a mapping with ``role`` and ``content`` (a text, None, or a list of text parts, which are
                joined by line feeds); other keys reach the template as they are, except that a tool call's arguments,
                JSON in a string, are parsed.
            add_generation_prompt: end with the beginning of an assistant's message.
            tools: descriptions of functions that the model may call.
            continue_final_message: end inside the last message instead, for the model to go on with it.

        Raises:
            InvalidRequestError: there is no template, or it cannot or will not render these messages.
        """
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template: send a plain prompt (Generate, or /v1/completions), or start the "
                "gateway with a template"
            )
        if not messages:
            raise InvalidRequestError("messages is empty: send at least one message")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError("add_generation_prompt and continue_final_message exclude each other: choose one")
        conversation = [_normalised(message, index) for index, message in enumerate(messages)]
        final = str(conversation[-1]["content"])
        if continue_final_message:
            conversation[-1]["content"] = final + _FINAL_MESSAGE_TAG
        prompt = self._run(
            messages=conversation,
            tools=list(tools) if tools else None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )
        return _cut_after(prompt, final) if continue_final_message else prompt

    def _run(self, **variables: object) -> str:
        assert self._template is not None
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(self._special_tokens | variables):
                length += len(piece)
                if length > self._max_characters:
                    break
                pieces.append(piece)
        except Exception as error:  # a template is a program: it may raise anything
            raise InvalidRequestError(f"the model's chat template cannot render these messages: {error}") from error
        if length > self._max_characters:
            raise InvalidRequestError(f"the chat template gives more than {self._max_characters} characters: send less")
        return "".join(pieces)


def _compile(template: str, now: Callable[[], datetime]) -> jinja2.Template:
    if len(template) > _MAX_TEMPLATE_CHARACTERS:
        raise ModelError(
            f"the chat template is longer than {_MAX_TEMPLATE_CHARACTERS} characters: check the model's files"
        )
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["range"] = _bounded_range
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"line {error.lineno} of the chat template is no valid Jinja: {error.message}") from error
    except (RecursionError, MemoryError, SyntaxError) as error:  # from compiling what Jinja made of it
        raise ModelError(f"the chat template cannot be compiled: {error}") from error


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's part for training; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _bounded_range(*arguments: int) -> range:
    numbers = range(*arguments)
    if len(numbers) > _MAX_RANGE:
        raise jinja2.TemplateRuntimeError(f"range() of more than {_MAX_RANGE} numbers")
    return numbers


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _normalised(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A copy in which ``role`` and ``content`` are texts and nothing is None."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"messages[{index}].role is missing: say who speaks, for example 'user'")
    normalised = {key: value for key, value in message.items() if value is not None}
    normalised["content"] = _text(message.get("content"), index)
    if isinstance(calls := normalised.get("tool_calls"), list):
        normalised["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return normalised


def _text(content: Any, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"messages[{index}].content is neither a text nor a list of parts")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"messages[{index}].content has a part that is no text: this model reads text only"
            )
        texts.append(text)
    return "\n".join(texts)


def _with_parsed_arguments(call: Any) -> Any:
    """A tool call whose arguments are an object: APIs send them as JSON in a string, templates write them as JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": parsed}}


def _cut_after(prompt: str, final: str) -> str:
    """The prompt up to the end of the final message's content, which the tag marks."""
    tag = _FINAL_MESSAGE_TAG.rstrip()
    end = prompt.rfind(tag)
    if end < 0 or final.strip() not in prompt:
        raise InvalidRequestError(
            "the chat template leaves out parts of the last message, which thus cannot be continued"
        )
    if prompt.startswith(_FINAL_MESSAGE_TAG, end):
        return prompt[:end]
    return prompt[:end].rstrip()  # a template that trims messages: trim the end of this one, too
