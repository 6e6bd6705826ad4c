"""What both endpoints' answers have in common: their head, what a choice gathers, usage, events.

Chunks are plain dicts that go straight to JSON: no check on the way out for every token. Their shapes are written down
in `responses`, and tests hold them against it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from shared.messages import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shared.generation import Delta, Finish, TokenLogprob, Usage

__all__ = ["FINISH_REASONS", "Answer", "Choice", "EventTemplates", "Head", "Prompts", "event", "usage_dict"]

FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.TOOL_CALLS: "tool_calls"}


@dataclass(frozen=True, slots=True)
class Head:
    """What is the same in all chunks of an answer."""

    id: str
    created: int
    """Unix time, seconds."""
    model: str
    system_fingerprint: str

    def fields(self, kind: str) -> dict[str, Any]:
        """Return the first fields of a chunk or a whole answer; ``kind`` is OpenAI's name for it."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


@dataclass(slots=True)
class CallParts:
    """A tool call that is coming in."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Choice:
    """All deltas of one choice, for an answer in one piece."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tool_calls: dict[int, CallParts] = field(default_factory=dict)
    finish: Finish | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    def add(self, delta: Delta) -> None:
        """Take one more."""
        self.texts.append(delta.text)
        if not delta.is_prompt:
            self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        for piece in delta.tool_calls:
            call = self.tool_calls.setdefault(piece.index, CallParts())
            call.id += piece.id
            call.name += piece.name
            call.arguments.append(piece.arguments)
        if delta.finish is not None:
            self.finish = delta.finish


Prompts = tuple[tuple[int, ...], ...]
"""Token ids of each prompt, where the request asks for them."""


class Answer(Protocol):
    """How an endpoint shows what was generated."""

    def opening(self, prompts: Prompts) -> bytes:
        """Return the events that say that the request was accepted."""
        ...

    def events(self, delta: Delta) -> bytes:
        """Return the events for a delta; none where it has no news for the client."""
        ...

    def usage_event(self, usage: Usage) -> bytes:
        """Return the event that has the usage and no choices."""
        ...

    def whole(self, prompts: Prompts, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the answer in one piece."""
        ...


def event(value: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


class EventTemplates:
    """Events of which only one text differs from one token to the next, for each choice."""

    def __init__(self, field: str) -> None:
        """``field``: that of the text, the first of its name in an event."""
        self._name = orjson.dumps(field) + b":"
        self._parts: dict[int, tuple[bytes, bytes]] = {}
        """By choice: what stands before the text and after it."""

    def event(self, choice: int, text: str, example: Callable[[int], bytes]) -> bytes:
        """Return the choice's event with the text; ``example`` makes the one in which it is empty."""
        parts = self._parts.get(choice)
        if parts is None:
            # Quotes in strings are escaped, so that nothing but the field looks like it.
            before, _, after = example(choice).partition(self._name + b'""')
            parts = self._parts[choice] = (before + self._name, after)
        return parts[0] + orjson.dumps(text) + parts[1]


def usage_dict(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }
