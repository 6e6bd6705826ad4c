"""Whole answers, joined from the deltas that clients get: what a program wants that does not stream.

::

    completion = await collect_async(client.generate("The capital of France is", GenerateOptions(n=2)))
    for choice in completion.choices:
        print(choice.text, choice.finish.reason)

What is returned is whole: a stream that ended too early raises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared.errors import ProtocolError
from shared.generation import ToolCall

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterable

    from shared.generation import Delta, Finish, TokenLogprob, ToolCallDelta, Usage

__all__ = ["Choice", "Completion", "collect", "collect_async"]


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole output."""

    index: int
    """Prompt times n plus sample."""
    text: str
    """With echo it begins with the prompt, and so do tokens and log probabilities."""
    token_ids: tuple[int, ...]
    finish: Finish
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of ``token_ids``, where asked for."""
    tool_calls: tuple[ToolCall, ...] = ()
    num_echoed_tokens: int = 0
    """How many of ``token_ids`` are the prompt's."""


@dataclass(frozen=True, slots=True)
class Completion:
    """All that a request returned."""

    request_id: str
    choices: tuple[Choice, ...]
    """In the order of their index."""
    usage: Usage
    prompt_token_ids: tuple[tuple[int, ...], ...] = ()
    """Of each prompt, where asked for."""

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text


def collect(deltas: Iterable[Delta]) -> Completion:
    """Read a stream to its end. Errors: those of the stream; ``ProtocolError`` where it is not whole."""
    builder = _CompletionBuilder()
    for delta in deltas:
        builder.add(delta)
    return builder.build()


async def collect_async(deltas: AsyncIterable[Delta]) -> Completion:
    """Read a stream of the asyncio client to its end; errors as in ``collect``."""
    builder = _CompletionBuilder()
    async for delta in deltas:
        builder.add(delta)
    return builder.build()


@dataclass(slots=True)
class _ToolCallParts:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _ChoiceParts:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tool_calls: dict[int, _ToolCallParts] = field(default_factory=dict)
    num_echoed_tokens: int = 0
    finish: Finish | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.is_prompt:
            self.num_echoed_tokens += len(delta.token_ids)
        for call in delta.tool_calls:
            self._add_tool_call(call)
        if delta.finish is not None:
            self.finish = delta.finish

    def _add_tool_call(self, delta: ToolCallDelta) -> None:
        call = self.tool_calls.setdefault(delta.index, _ToolCallParts(delta.id, delta.name))
        call.arguments.append(delta.arguments)

    def build(self, index: int) -> Choice:
        if self.finish is None:
            raise ProtocolError(f"the stream ended before choice {index} did; ask again")
        return Choice(
            index,
            "".join(self.text),
            tuple(self.token_ids),
            self.finish,
            tuple(self.logprobs),
            tuple(ToolCall(call.id, call.name, "".join(call.arguments)) for _, call in sorted(self.tool_calls.items())),
            self.num_echoed_tokens,
        )


class _CompletionBuilder:
    def __init__(self) -> None:
        self._request_id = ""
        self._choices: dict[int, _ChoiceParts] = {}
        self._usage: Usage | None = None
        self._prompt_token_ids: tuple[tuple[int, ...], ...] = ()

    def add(self, delta: Delta) -> None:
        if delta.request_id:
            self._request_id, self._prompt_token_ids = delta.request_id, delta.prompt_token_ids
        if delta.usage is not None:
            self._usage = delta.usage
        # The first delta only says that the request was accepted, the last may tell of usage alone.
        if delta.text or delta.token_ids or delta.tool_calls or delta.finish is not None:
            self._choices.setdefault(delta.choice, _ChoiceParts()).add(delta)

    def build(self) -> Completion:
        if self._usage is None or not self._choices:
            raise ProtocolError("the stream ended before its last delta; ask again")
        choices = tuple(parts.build(index) for index, parts in sorted(self._choices.items()))
        return Completion(self._request_id, choices, self._usage, self._prompt_token_ids)
