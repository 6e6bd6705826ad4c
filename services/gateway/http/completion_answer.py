"""The answer of ``POST /v1/completions``, whole and in chunks."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import orjson

from services.gateway.http.answer import FINISH_REASONS, EventTemplates, event, usage_dict
from services.gateway.http.logprobs import CompletionLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.gateway.http.answer import Choice, Head, Prompts
    from services.gateway.http.completion_body import CompletionBody
    from shared.generation import Delta, Finish, Usage

__all__ = ["CompletionAnswer"]


class CompletionAnswer:
    """An `Answer` whose choices are texts; whole or streamed, their fields are the same."""

    def __init__(self, head: Head, body: CompletionBody) -> None:
        self._head = head.fields("text_completion")
        self._num_per_prompt = body.n or 1
        self._shows_token_ids = bool(body.return_token_ids)
        self._unsent_prompts: dict[int, tuple[int, ...]] = {}
        """By choice: what its first chunk has."""
        self._shows_logprobs = body.logprobs is not None
        self._logprobs: defaultdict[int, CompletionLogprobs] = defaultdict(CompletionLogprobs)
        self._shows_texts_only = not (self._shows_token_ids or self._shows_logprobs)
        self._text_events = EventTemplates("text")
        # Where the usage comes in the end, all other chunks say that they have none.
        self._tail: dict[str, Any] = {"usage": None} if body.includes_usage else {}

    def opening(self, prompts: Prompts) -> bytes:
        """Return nothing: a text has no beginning of its own."""
        if self._shows_token_ids:
            self._unsent_prompts = self._by_choice(prompts)
        return b""

    def _by_choice(self, prompts: Prompts) -> dict[int, tuple[int, ...]]:
        return dict(enumerate(ids for ids in prompts for _ in range(self._num_per_prompt)))

    def events(self, delta: Delta) -> bytes:
        """Return one chunk."""
        if self._shows_texts_only and delta.finish is None:  # as good as always
            return self._text_events.event(delta.choice, delta.text, self._empty) if delta.text else b""
        shows = delta.text or delta.finish or delta.logprobs or (self._shows_token_ids and delta.token_ids)
        if not shows:
            return b""
        logprobs = self._logprobs[delta.choice].add(delta.logprobs) if self._shows_logprobs else None
        choice = _choice_fields(delta.choice, delta.text, logprobs, delta.finish)
        if self._shows_token_ids:
            choice["token_ids"] = () if delta.is_prompt else delta.token_ids
            prompt = self._unsent_prompts.pop(delta.choice, None)
            if prompt is not None:
                choice["prompt_token_ids"] = prompt
        return self._event(choice)

    def _empty(self, index: int) -> bytes:
        return self._event(_choice_fields(index, "", None, None))

    def _event(self, choice: dict[str, Any]) -> bytes:
        return event({**self._head, "choices": [choice], **self._tail})

    def usage_event(self, usage: Usage) -> bytes:
        """Return the last chunk."""
        return event({**self._head, "choices": [], "usage": usage_dict(usage)})

    def whole(self, prompts: Prompts, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the answer in one piece."""
        by_choice = self._by_choice(prompts)
        shown = [self._choice(index, choice, by_choice.get(index)) for index, choice in enumerate(choices)]
        return orjson.dumps({**self._head, "choices": shown, "usage": usage_dict(usage)})

    def _choice(self, index: int, choice: Choice, prompt: tuple[int, ...] | None) -> dict[str, Any]:
        logprobs = CompletionLogprobs().add(choice.logprobs) if self._shows_logprobs else None
        shown = _choice_fields(index, choice.text, logprobs, choice.finish)
        if self._shows_token_ids:
            shown["token_ids"] = choice.token_ids
            shown["prompt_token_ids"] = prompt
        return shown


def _choice_fields(index: int, text: str, logprobs: dict[str, Any] | None, finish: Finish | None) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": None if finish is None else FINISH_REASONS[finish.reason],
        "stop_reason": None if finish is None else finish.stop,
    }
