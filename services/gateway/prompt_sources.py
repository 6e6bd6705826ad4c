"""Where the prompts of a request come from: texts to tokenize, ids, or a conversation for the model's own template.

Knows the two kinds of requests; `generation` serves both alike. Tokenizing always runs in a thread: a long text takes
the tokenizer for up to seconds, and even a short one may have to wait for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from services.gateway.admission import (
    DEFAULT_MAX_TOKENS,
    check_messages,
    check_text,
    check_vocabulary,
    num_utf8_bytes,
)
from services.gateway.jobs import Prompt, prompt_field
from services.gateway.text.prompts import encode_conversation, encode_text
from services.gateway.tools import tool_use
from shared.messages import token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.gateway.served_model import ServedModel
    from services.gateway.tools import ToolUse
    from shared.generation import ChatMessage, ChatRequest, GenerateOptions, GenerateRequest

__all__ = ["Completion", "Conversation", "PreparedPrompts", "PromptSource"]

_BYTES_PER_ID = 4


@dataclass(frozen=True, slots=True)
class PreparedPrompts:
    """Prompts as the model reads them."""

    prompts: list[Prompt]
    tools: ToolUse | None = None
    """What the model may call, and how its calls are found in the output."""


class PromptSource(Protocol):
    """A request, as far as it is about prompts."""

    method: str
    """For logs and metrics."""
    request_id: str
    options: GenerateOptions
    echo: bool
    returns_prompts: bool
    """The first delta has the token ids of the prompts."""
    continues: bool
    """The text of an output goes on from that of its prompt."""
    num_prompts: int
    default_max_tokens: int | None
    """None is all that is left."""

    def check(self, model: ServedModel) -> int:
        """Return the size of the prompts, bytes; raise ``InvalidRequestError`` where that is enough to refuse them."""

    async def prepare(self, model: ServedModel) -> PreparedPrompts:
        """Return the prompts. Raises ``InvalidRequestError`` where there are none to be had."""


class Completion:
    """Prompts to continue."""

    method = "Generate"
    default_max_tokens: int | None = DEFAULT_MAX_TOKENS

    def __init__(self, request: GenerateRequest) -> None:
        self.request_id = request.request_id
        self.options = request.options
        self.echo = self.continues = request.echo
        self.returns_prompts = request.return_prompt_token_ids
        self.num_prompts = len(request.prompts)
        self._prompts = request.prompts

    def check(self, model: ServedModel) -> int:
        """Look at the lengths of texts."""
        num_bytes = 0
        for index, prompt in enumerate(self._prompts):
            if isinstance(prompt, str):
                field = "text" if self.num_prompts == 1 else prompt_field(index, self.num_prompts)
                size = num_utf8_bytes(field, prompt)
                check_text(field, size, model.engine)
                num_bytes += size
            else:
                num_bytes += _BYTES_PER_ID * len(prompt)
        return num_bytes

    async def prepare(self, model: ServedModel) -> PreparedPrompts:
        """Tokenize texts; ids are taken as they are."""
        return await asyncio.to_thread(
            lambda: PreparedPrompts([self._prompt(index, model) for index in range(self.num_prompts)])
        )

    def _prompt(self, index: int, model: ServedModel) -> Prompt:
        prompt = self._prompts[index]
        text = prompt if isinstance(prompt, str) else None
        ids = encode_text(model.text.tokenizer, prompt) if isinstance(prompt, str) else prompt
        return _known(prompt_field(index, self.num_prompts), ids, text, model)


class Conversation:
    """A conversation to answer."""

    method = "Chat"
    default_max_tokens: int | None = None
    echo = False
    num_prompts = 1

    def __init__(self, request: ChatRequest) -> None:
        self.request_id = request.request_id
        self.options = request.options
        self.continues = request.continue_final_message
        self.returns_prompts = request.return_prompt_token_ids
        self._request = request

    def check(self, model: ServedModel) -> int:
        """Look at the turns and at the length of it all."""
        request = self._request
        check_messages(request.messages)
        texts = [
            text
            for message in request.messages
            for text in (message.role, message.content, message.name, *(call.arguments for call in message.tool_calls))
        ]
        texts += [text for tool in request.tools for text in (tool.name, tool.description, tool.parameters)]
        num_bytes = sum(num_utf8_bytes("messages", text) for text in texts)
        check_text("messages", num_bytes, model.engine)
        tool_use(request, model.text)
        return num_bytes

    async def prepare(self, model: ServedModel) -> PreparedPrompts:
        """Render the conversation."""
        request = self._request

        def render() -> PreparedPrompts:
            tools = tool_use(request, model.text)
            text = model.text.chat_template(with_tools=tools is not None).render(
                [_for_template(message) for message in request.messages],
                tools=[] if tools is None else tools.descriptions(),
                continue_final_message=request.continue_final_message,
            )
            ids = encode_conversation(model.text.tokenizer, text)
            return PreparedPrompts([_known("prompt", ids, text, model)], tools)

        return await asyncio.to_thread(render)


def _for_template(message: ChatMessage) -> ChatMessage:
    """Templates do not know OpenAI's newer name of a role."""
    return dataclasses.replace(message, role="system") if message.role == "developer" else message


def _known(field: str, ids: Sequence[int], text: str | None, model: ServedModel) -> Prompt:
    check_vocabulary(field, ids, model.engine)
    return Prompt(token_ids(ids), text)
