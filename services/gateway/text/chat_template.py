"""A conversation as the one text that a chat model was trained on: the model's own template, filled in.

Knows what transformers' ``apply_chat_template`` hands to a template: the same messages and tools give the same text.
Does not know tokens, the shape of any API, nor how templates are run (`template_sandbox`).
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from services.gateway.text.json_text import parse_json
from services.gateway.text.template_sandbox import SandboxedTemplate
from shared.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shared.generation import ChatMessage, ToolCall

__all__ = ["MAX_PROMPT_CHARACTERS", "ChatTemplate"]

MAX_PROMPT_CHARACTERS = 1 << 24
"""Longest text that a template may give; far above any context length."""

_FINAL_MESSAGE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""transformers' mark for the end of the message to continue; the space at its end shows whether a template trims."""


class ChatTemplate:
    """One template, compiled once; it may be rendered in several threads at once.

    Args:
        text: the Jinja text.
        bos_token: what ``bos_token`` is in the template; None leaves it undefined.
        eos_token: the same for ``eos_token``.
        now: the local time, for templates that state the date.
        max_characters: longest text that `render` may give.
        max_cpu_s: processor time that `render` may take, seconds.

    Raises:
        ModelError: the text is no valid Jinja.
    """

    def __init__(
        self,
        text: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
        max_characters: int = MAX_PROMPT_CHARACTERS,
        max_cpu_s: float = 2.0,
    ) -> None:
        special = {"bos_token": bos_token, "eos_token": eos_token}
        self._special_tokens = {name: token for name, token in special.items() if token is not None}
        self._template = SandboxedTemplate(text, now=now, max_characters=max_characters, max_cpu_s=max_cpu_s)
        self.text = text

    @property
    def knows_tools(self) -> bool:
        """Whether it shows the model the tools that it may call."""
        return "tools" in self._template.variables

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        continue_final_message: bool = False,
    ) -> str:
        """The prompt for ``messages``, special tokens included: encode it with `prompts.encode_conversation`.

        It ends with the beginning of an assistant's message or, with ``continue_final_message``, inside the last one,
        which must be the assistant's, for the model to go on with it.

        ``tools`` are what the model may call (`services.gateway.tools.describe_tools`); a call's arguments reach the
        template as an object where they are the text of one.

        Raises:
            InvalidRequestError: the template cannot or will not render these messages.
        """
        if not messages:
            raise InvalidRequestError("messages is empty: send at least one message")
        conversation = [_as_mapping(message) for message in messages]
        final = messages[-1].content
        if continue_final_message:
            if messages[-1].role != "assistant":
                raise InvalidRequestError(
                    f"continue_final_message: the last message is of role {messages[-1].role!r}; it must be the "
                    "'assistant's, whose text the output goes on with"
                )
            conversation[-1]["content"] = final + _FINAL_MESSAGE_TAG
        prompt = self._run(
            messages=conversation,
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=not continue_final_message,
        )
        return _cut_after(prompt, final) if continue_final_message else prompt

    def _run(self, **variables: object) -> str:
        try:
            return self._template.render(self._special_tokens | variables)
        except Exception as error:  # a template is a program: it may raise anything
            raise InvalidRequestError(f"the model's chat template cannot render these messages: {error}") from error


def _as_mapping(message: ChatMessage) -> dict[str, Any]:
    """A message as templates read it: a key that says nothing is absent, but for the content."""
    mapping: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        mapping["tool_calls"] = [_call_as_mapping(call) for call in message.tool_calls]
    if message.tool_call_id:
        mapping["tool_call_id"] = message.tool_call_id
    if message.name:
        mapping["name"] = message.name
    return mapping


def _call_as_mapping(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = parse_json(call.arguments or "{}")
    except ValueError:  # what a model wrote and nobody could read: the model may see it again
        arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


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
