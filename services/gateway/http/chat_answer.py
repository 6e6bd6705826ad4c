"""The answer of ``POST /v1/chat/completions``, whole and in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from services.gateway.http.answer import FINISH_REASONS, EventTemplates, event, usage_dict
from services.gateway.http.logprobs import chat_logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.gateway.http.answer import Choice, Head, Prompts
    from services.gateway.http.chat_body import ChatBody
    from shared.generation import Delta, ToolCallDelta, Usage

__all__ = ["ChatAnswer"]


class ChatAnswer:
    """An `Answer` whose choices are messages."""

    def __init__(self, head: Head, body: ChatBody) -> None:
        self._head = head
        self._chunk_head = head.fields("chat.completion.chunk")
        self._num_choices = body.n or 1
        self._shows_token_ids = bool(body.return_token_ids)
        self._shows_logprobs = bool(body.logprobs)
        self._text_events = EventTemplates("content")
        # Where the usage comes in the end, all other chunks say that they have none.
        self._tail: dict[str, Any] = {"usage": None} if body.includes_usage else {}

    def opening(self, prompts: Prompts) -> bytes:
        """Return each choice's role; the first chunk of all has the prompt's ids."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        first = self._event(0, delta, **self._prompt_fields(prompts))
        return first + b"".join(self._event(index, delta) for index in range(1, self._num_choices))

    def _prompt_fields(self, prompts: Prompts) -> dict[str, Any]:
        return {"prompt_token_ids": prompts[0]} if self._shows_token_ids else {}

    def events(self, delta: Delta) -> bytes:
        """Return a chunk with what is new, and one for the end, which has nothing else."""
        is_text_only = not (delta.finish or delta.logprobs or delta.tool_calls or self._shows_token_ids)
        if is_text_only and delta.text:  # as good as always
            return self._text_events.event(delta.choice, delta.text, self._empty)
        news: dict[str, Any] = {}
        if delta.text or delta.logprobs:
            news["content"] = delta.text
        if delta.tool_calls:
            news["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
        shows_ids = self._shows_token_ids and delta.token_ids
        events = self._event(delta.choice, news, delta) if news or shows_ids else b""
        finish = delta.finish
        if finish is not None:
            reason = FINISH_REASONS[finish.reason]
            events += self._event(delta.choice, {}, finish_reason=reason, stop_reason=finish.stop)
        return events

    def _empty(self, index: int) -> bytes:
        return self._event(index, {"content": ""})

    def _event(
        self,
        index: int,
        news: dict[str, Any],
        delta: Delta | None = None,
        *,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
        **more: Any,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "delta": news,
            "logprobs": chat_logprobs(delta.logprobs) if delta is not None and delta.logprobs else None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
        if self._shows_token_ids:
            choice["token_ids"] = () if delta is None else delta.token_ids
        return event({**self._chunk_head, "choices": [choice], **self._tail, **more})

    def usage_event(self, usage: Usage) -> bytes:
        """Return the last chunk."""
        return event({**self._chunk_head, "choices": [], "usage": usage_dict(usage)})

    def whole(self, prompts: Prompts, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the answer in one piece."""
        answer = self._head.fields("chat.completion")
        answer["choices"] = [self._choice(index, choice) for index, choice in enumerate(choices)]
        answer["usage"] = usage_dict(usage)
        return orjson.dumps(answer | self._prompt_fields(prompts))

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text = choice.text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.tool_calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.arguments)},
                }
                for _, call in sorted(choice.tool_calls.items())
            ]
        assert choice.finish is not None
        shown: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(choice.logprobs) if self._shows_logprobs else None,
            "finish_reason": FINISH_REASONS[choice.finish.reason],
            "stop_reason": choice.finish.stop,
        }
        if self._shows_token_ids:
            shown["token_ids"] = choice.token_ids
        return shown


def _call_delta(piece: ToolCallDelta) -> dict[str, Any]:
    """The first piece of a call, which has its id, says what kind of call it is."""
    if piece.id:
        function = {"name": piece.name, "arguments": piece.arguments}
        return {"index": piece.index, "id": piece.id, "type": "function", "function": function}
    return {"index": piece.index, "function": {"arguments": piece.arguments}}
