"""A JSON object, read as it is being written: which members it has, before it is complete.

Knows JSON (RFC 8259), strictly: the first character that cannot belong to an object is found when it comes. Does not
know what the members mean.
"""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass

__all__ = ["Member", "ObjectScanner"]

_BLANKS = " \t\r\n"
_LITERAL_STARTS = "-0123456789tfn"
_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_MAX_LITERAL_CHARACTERS = 1000
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_MAX_DEPTH = 100


class _Expects(enum.Enum):
    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()
    KEY = enum.auto()
    KEY_OR_END = enum.auto()
    COLON = enum.auto()
    COMMA_OR_END = enum.auto()


@dataclass(slots=True)
class Member:
    """Where a member's value is in the text."""

    start: int
    end: int | None = None
    """None while it is being written."""


class ObjectScanner:
    """Reads one object."""

    def __init__(self) -> None:
        self.text = ""
        """The object so far, from its brace on."""
        self.members: dict[str, Member] = {}
        """Those of the object itself, not of objects in it."""
        self.is_complete = False
        self.is_broken = False
        """It is no object: the next character cannot belong to one."""
        self._open: list[str] = []
        """Braces and brackets that wait for their ends."""
        self._expects = _Expects.VALUE
        self._key = ""
        self._literal_start: int | None = None
        self._string_start: int | None = None
        self._string_is_key = False
        self._is_escaped = False
        self._num_hex_left = 0

    def feed(self, text: str) -> str:
        """Read on and return what is not part of the object: what comes after it, or shows that it is none."""
        at = len(self.text)
        self.text += text
        try:
            while at < len(self.text) and not self.is_complete:
                at = self._read(at)
        except ValueError:
            self.is_broken = True
        rest = self.text[at:]
        self.text = self.text[:at]
        return rest

    def _read(self, at: int) -> int:
        """Take in at least one character, or the end of a literal before it; return where to go on."""
        character = self.text[at]
        if self._string_start is not None:
            return self._in_string(at, character)
        if self._literal_start is not None:
            return self._in_literal(at, character)
        if character in _BLANKS and self._open:
            return at + 1
        match self._expects:
            case _Expects.VALUE | _Expects.VALUE_OR_END:
                self._begin_value(at, character)
            case _Expects.KEY | _Expects.KEY_OR_END if character == '"':
                self._string_start, self._string_is_key = at, True
            case _Expects.KEY_OR_END if character == "}":
                self._end_container(at, character)
            case _Expects.COLON if character == ":":
                self._expects = _Expects.VALUE
            case _Expects.COMMA_OR_END if character == ",":
                self._expects = _Expects.KEY if self._open[-1] == "{" else _Expects.VALUE
            case _Expects.COMMA_OR_END:
                self._end_container(at, character)
            case _:
                raise _unexpected(character)
        return at + 1

    def _begin_value(self, at: int, character: str) -> None:
        if not self._open and character != "{":
            raise _unexpected(character)
        if character == "]" and self._expects is _Expects.VALUE_OR_END:
            self._end_container(at, character)
            return
        if len(self._open) == 1:
            self.members[self._key] = Member(at)
        if character in "{[":
            if len(self._open) == _MAX_DEPTH:
                raise ValueError(f"nested more than {_MAX_DEPTH} deep")
            self._open.append(character)
            self._expects = _Expects.KEY_OR_END if character == "{" else _Expects.VALUE_OR_END
        elif character == '"':
            self._string_start, self._string_is_key = at, False
        elif character in _LITERAL_STARTS:
            self._literal_start = at
        else:
            raise _unexpected(character)

    def _end_container(self, at: int, character: str) -> None:
        if {"}": "{", "]": "["}.get(character) != self._open[-1]:
            raise _unexpected(character)
        self._open.pop()
        if self._open:
            self._end_value(at + 1)
        else:
            self.is_complete = True

    def _end_value(self, end: int) -> None:
        self._expects = _Expects.COMMA_OR_END
        if len(self._open) == 1:
            self.members[self._key].end = end

    def _in_literal(self, at: int, character: str) -> int:
        assert self._literal_start is not None
        if character not in ",]}" and character not in _BLANKS:
            if at - self._literal_start > _MAX_LITERAL_CHARACTERS:
                raise ValueError("a number without end")
            return at + 1
        if not _LITERAL.fullmatch(self.text, self._literal_start, at):
            raise _unexpected(character)
        self._literal_start = None
        self._end_value(at)
        return at

    def _in_string(self, at: int, character: str) -> int:
        if self._num_hex_left:
            if character not in "0123456789abcdefABCDEF":
                raise _unexpected(character)
            self._num_hex_left -= 1
        elif self._is_escaped:
            if character not in '"\\/bfnrtu':
                raise _unexpected(character)
            self._is_escaped = False
            self._num_hex_left = 4 if character == "u" else 0
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._end_string(at + 1)
        elif plain := _PLAIN.match(self.text, at):
            return plain.end()
        else:
            raise _unexpected(character)
        return at + 1

    def _end_string(self, end: int) -> None:
        start, self._string_start = self._string_start, None
        if not self._string_is_key:
            self._end_value(end)
            return
        self._expects = _Expects.COLON
        if len(self._open) == 1:
            self._key = json.loads(self.text[start:end])


def _unexpected(character: str) -> ValueError:
    return ValueError(f"{character!r} cannot come here")
