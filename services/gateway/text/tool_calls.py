"""Calls of tools in a model's output, taken out as they are written.

Knows the notations that models are trained on. What is no call after all comes out as the text that it is: nothing is
lost, but white space around calls. Does not know tokens; markers that are special tokens must be made visible to it
(`services.gateway.tools.ToolUse.markers`).

A call is believed once its tool and the beginning of its arguments are known; from then on its arguments are handed out
as they come. If they break off, they stay broken off, as with any API that streams them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from services.gateway.text.object_scanner import ObjectScanner
from shared.generation import ToolCallDelta

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from services.gateway.text.object_scanner import Member

__all__ = ["HERMES", "LLAMA3", "MISTRAL", "ToolCallFormat", "ToolCallParser", "detect_format"]

_MAX_UNSURE_CHARACTERS = 4096
"""Of an object whose tool is not known yet."""
_MAX_BLANKS = 64
"""Of white space at the beginning: longer one is text, whatever follows."""
_ARGUMENTS = ("arguments", "parameters")
_BLANKS = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a family of models writes calls."""

    name: str
    opening: str
    """Comes before a call, or a list of them."""
    closing: str = ""
    """Comes after a call."""
    arguments: str = "arguments"
    """The member that has the arguments; either name is understood."""
    is_list: bool = False
    """One opening, then all calls in a list."""
    is_bare: bool = False
    """An output that begins with a call needs no opening."""
    separators: str = ""
    """May stand between bare calls."""


HERMES = ToolCallFormat("hermes", "<tool_call>", "</tool_call>")
"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3."""
LLAMA3 = ToolCallFormat("llama3", "<|python_tag|>", arguments="parameters", is_bare=True, separators=";")
"""``{"name": ..., "parameters": {...}}``, with or without ``<|python_tag|>``: Llama 3.1 and 3.2."""
MISTRAL = ToolCallFormat("mistral", "[TOOL_CALLS]", is_list=True)
"""``[TOOL_CALLS] [{"name": ..., "arguments": {...}}]``: Mistral up to its tokenizer's version 7."""


def detect_format(template: str) -> ToolCallFormat | None:
    """The notation that a chat template teaches, None for one that is not known here."""
    if MISTRAL.opening in template:
        return None if "[ARGS]" in template else MISTRAL
    if HERMES.opening in template:
        return None if any(other in template for other in ("<function=", "<arg_key>")) else HERMES
    if LLAMA3.opening in template or ("<|start_header_id|>" in template and '"parameters": ' in template):
        return LLAMA3
    return None


class ToolCallParser:
    """Splits one output into text and calls.

    Args:
        form: the notation.
        names: the tools there are; what calls another one is text.
        new_id: makes an id for a call.
        only_one: what comes after the first call is dropped.
    """

    def __init__(
        self, form: ToolCallFormat, names: Container[str], new_id: Callable[[], str], *, only_one: bool = False
    ) -> None:
        self._form = form
        self._names = names
        self._new_id = new_id
        self.only_one = only_one
        self._step: Callable[[], bool] = self._in_text
        """Reads some of the input; returns whether to go on, rather than to wait for more."""
        self._input = ""
        """What has not been read yet."""
        self._unsure = ""
        """An object that is no call yet, with what stands before it: text, if it never is one."""
        self._object = ObjectScanner()
        self._is_call = False
        """The object is a call: its name has been given out, and its arguments are as they come."""
        self._arguments: Member | None = None
        """Those of the call."""
        self._is_blank = True
        """Nothing but white space since the beginning, or since the last call."""
        self._num_calls = 0
        self._text: list[str] = []
        self._deltas: list[ToolCallDelta] = []

    @property
    def is_over(self) -> bool:
        """Whether the only call that there may be has ended."""
        return self._step == self._after_only_call

    def push(self, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Read on; return what is text, and what has come of calls."""
        self._input += text
        while self._input and self._step():
            pass
        return self._take()

    def finish(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Return what was held back, now that nothing follows."""
        if self._step == self._in_text:
            if self._input.strip(_BLANKS) or not self._num_calls:
                self._text.append(self._input)
        elif self._step != self._after_call and not self._is_call:
            self._text.append(self._unsure + self._input)
        self._input = ""
        return self._take()

    def _take(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        text, deltas = "".join(self._text), tuple(self._deltas)
        self._text.clear()
        self._deltas.clear()
        return text, deltas

    def _in_text(self) -> bool:
        opening = self._form.opening
        if self._form.is_bare and self._is_blank and self._input.lstrip(_BLANKS).startswith("{"):
            self._begin("", self._input)
            return True
        at = self._input.find(opening)
        end = at if at >= 0 else len(self._input) - _num_begun(self._input, opening)
        text = self._input[:end]
        self._is_blank = self._is_blank and len(text) < _MAX_BLANKS and not text.strip(_BLANKS)
        if not self._is_blank:
            self._text.append(text)
            self._input = self._input[end:]
        if at < 0:
            return False  # white space at the beginning waits: a call may follow
        end = self._input.index(opening) + len(opening)
        self._begin(self._input[:end], self._input[end:])  # white space before it, too: this may be no call after all
        return True

    def _begin(self, opening: str, rest: str) -> None:
        self._unsure, self._input = opening, rest
        self._next_object(self._before_list if self._form.is_list else self._before_object)

    def _next_object(self, step: Callable[[], bool]) -> None:
        self._object = ObjectScanner()
        self._is_call = False
        self._step = step

    def _before_list(self) -> bool:
        self._skip_blanks()
        if self._input.startswith("["):
            self._unsure += "["
            self._input = self._input[1:]
            self._step = self._before_object
        elif self._input:
            self._reject()
        return True

    def _before_object(self) -> bool:
        self._skip_blanks()
        if self._input:
            self._step = self._in_object
        return True

    def _skip_blanks(self) -> None:
        rest = self._input.lstrip(_BLANKS)
        self._unsure += self._input[: len(self._input) - len(rest)]
        self._input = rest

    def _in_object(self) -> bool:
        rest = self._object.feed(self._input)
        if not self._is_call:
            self._unsure += self._input[: len(self._input) - len(rest)]
        self._input = rest
        self._give_call()
        is_over = self._object.is_complete or self._object.is_broken
        if self._is_call:
            if is_over and self.only_one:
                self._step = self._after_only_call
            elif self._object.is_complete:
                self._step, self._is_blank = self._after_call, True
            elif self._object.is_broken:
                self._step, self._is_blank = self._in_text, False
        elif is_over or len(self._unsure) > _MAX_UNSURE_CHARACTERS:
            self._reject()
            return True
        return is_over

    def _give_call(self) -> None:
        """Give out what is new of the call, if the object is one."""
        if self._is_call:
            if self._arguments is not None and (more := self._arguments.take()):
                self._deltas.append(ToolCallDelta(self._num_calls - 1, arguments=more))
            return
        member = next((member for key, member in self._object.members.items() if key in _ARGUMENTS), None)
        name = _value(self._object.members.get("name"))
        first = self._first_arguments(member)
        if first is None or not isinstance(name, str) or name not in self._names:
            return
        self._is_call, self._arguments = True, member
        self._unsure = ""
        if member is not None:
            member.take()
        self._deltas.append(ToolCallDelta(self._num_calls, self._new_id(), name, first))
        self._num_calls += 1

    def _first_arguments(self, member: Member | None) -> str | None:
        """How they begin; None as long as they may turn out to be none."""
        if member is not None and member.text.startswith("{"):
            return member.text
        if not self._object.is_complete:
            return None
        value = _value(member)
        return "{}" if value is None else value if isinstance(value, str) and _is_object(value) else None

    def _after_call(self) -> bool:
        rest = self._input.lstrip(_BLANKS + self._form.separators)
        closing = self._form.closing
        if self._form.is_list:
            return self._after_listed_call(rest)
        if closing and rest.startswith(closing):
            rest = rest[len(closing) :]
        elif not rest or (closing and closing.startswith(rest)):
            self._input = rest
            return False
        self._input = rest
        self._step = self._in_text
        return True

    def _after_only_call(self) -> bool:
        self._input = ""
        return False

    def _after_listed_call(self, rest: str) -> bool:
        if not rest:
            self._input = ""
            return False
        if rest[0] == ",":
            self._unsure, self._input = ",", rest[1:]
            self._next_object(self._before_object)
            return True
        self._input = rest.removeprefix("]")
        self._step = self._in_text
        return True

    def _reject(self) -> None:
        """Take it as text; what follows its first character, or its opening, may still have a call in it."""
        text = self._unsure + self._input
        num_text = len(self._form.opening) if text.startswith(self._form.opening) else 1
        self._text.append(text[:num_text])
        self._input = text[num_text:]
        self._step, self._is_blank = self._in_text, False


def _num_begun(text: str, marker: str) -> int:
    """Characters at the end of ``text`` that ``marker`` may begin with."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0 and not marker.startswith(text[at:]):
        at = text.find(marker[0], at + 1)
    return len(text) - at if at >= 0 else 0


def _value(member: Member | None) -> Any:
    """The value of a member that has not been taken; None while it is being written."""
    return None if member is None or not member.is_complete else json.loads(member.text)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
