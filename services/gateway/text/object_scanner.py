"""A JSON object, read as it is being written: which members it has, before it is complete.

Knows JSON (RFC 8259), strictly: the first character that cannot belong to an object is found when it comes. Does not
know what the members mean.
"""

from __future__ import annotations

import enum
import json
import re

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


class Member:
    """What is known of a member's value."""

    __slots__ = ("_parts", "is_complete")

    def __init__(self) -> None:
        self.is_complete = False
        self._parts: list[str] = []

    def add(self, text: str) -> None:
        """Go on with the value's text."""
        self._parts.append(text)

    @property
    def text(self) -> str:
        """The value as it is written, as far as it has not been taken."""
        return "".join(self._parts)

    def take(self) -> str:
        """Return ``text`` and forget it."""
        text = "".join(self._parts)
        self._parts.clear()
        return text


class ObjectScanner:
    """Reads one object; the cost of a character does not depend on how many came before."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        """Those of the object itself, not of objects in it; of two with the same name the first."""
        self.is_complete = False
        self.is_broken = False
        """It is no object: the next character cannot belong to one."""
        self._open: list[str] = []
        """Braces and brackets that wait for their ends."""
        self._expects = _Expects.VALUE
        self._member: Member | None = None
        """Whose value is being read, since ``_member_start`` in this text."""
        self._member_start = 0
        self._literal: str | None = None
        """The literal that is being read, as far as it is known."""
        self._is_in_string = False
        self._key: list[str] | None = None
        """The parts of a member's name while it is being read."""
        self._name = ""
        self._is_key = False
        """The string is a name, of a member of any object."""
        self._is_escaped = False
        self._num_hex_left = 0

    def feed(self, text: str) -> str:
        """Read on and return what is not part of the object: what comes after it, or shows that it is none."""
        at = self._member_start = 0
        try:
            while at < len(text) and not self.is_complete:
                at = self._read(text, at)
        except ValueError:
            self.is_broken = True
        if self._member is not None:
            self._member.add(text[self._member_start : at])
        return text[at:]

    def _read(self, text: str, at: int) -> int:
        """Take in at least one character, or the end of a literal before it; return where to go on."""
        character = text[at]
        if self._is_in_string:
            return self._in_string(text, at, character)
        if self._literal is not None:
            return self._in_literal(text, at, character)
        if character in _BLANKS and self._open:
            return at + 1
        match self._expects:
            case _Expects.VALUE | _Expects.VALUE_OR_END:
                self._begin_value(text, at, character)
            case _Expects.KEY | _Expects.KEY_OR_END if character == '"':
                self._is_in_string = self._is_key = True
                self._key = ['"'] if len(self._open) == 1 else None
            case _Expects.KEY_OR_END if character == "}":
                self._end_container(text, at, character)
            case _Expects.COLON if character == ":":
                self._expects = _Expects.VALUE
            case _Expects.COMMA_OR_END if character == ",":
                self._expects = _Expects.KEY if self._open[-1] == "{" else _Expects.VALUE
            case _Expects.COMMA_OR_END:
                self._end_container(text, at, character)
            case _:
                raise _unexpected(character)
        return at + 1

    def _begin_value(self, text: str, at: int, character: str) -> None:
        if not self._open and character != "{":
            raise _unexpected(character)
        if character == "]" and self._expects is _Expects.VALUE_OR_END:
            self._end_container(text, at, character)
            return
        is_container = character in "{["
        if not (is_container or character == '"' or character in _LITERAL_STARTS):
            raise _unexpected(character)
        if is_container and len(self._open) == _MAX_DEPTH:
            raise ValueError(f"nested more than {_MAX_DEPTH} deep")
        if len(self._open) == 1:
            self._member = Member()
            self.members.setdefault(self._name, self._member)
            self._member_start = at
        if is_container:
            self._open.append(character)
            self._expects = _Expects.KEY_OR_END if character == "{" else _Expects.VALUE_OR_END
        elif character == '"':
            self._is_in_string, self._is_key = True, False
        else:
            self._literal = character

    def _end_container(self, text: str, at: int, character: str) -> None:
        if {"}": "{", "]": "["}.get(character) != self._open[-1]:
            raise _unexpected(character)
        self._open.pop()
        if self._open:
            self._end_value(text, at + 1)
        else:
            self.is_complete = True

    def _end_value(self, text: str, end: int) -> None:
        self._expects = _Expects.COMMA_OR_END
        if len(self._open) == 1 and self._member is not None:
            self._member.add(text[self._member_start : end])
            self._member.is_complete = True
            self._member = None

    def _in_literal(self, text: str, at: int, character: str) -> int:
        assert self._literal is not None
        if character not in ",]}" and character not in _BLANKS:
            if len(self._literal) == _MAX_LITERAL_CHARACTERS:
                raise ValueError("a number without end")
            self._literal += character
            return at + 1
        if not _LITERAL.fullmatch(self._literal):
            raise _unexpected(character)
        self._literal = None
        self._end_value(text, at)
        return at

    def _in_string(self, text: str, at: int, character: str) -> int:
        end = at + 1
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
            self._is_in_string = False
        elif plain := _PLAIN.match(text, at):
            end = plain.end()
        else:
            raise _unexpected(character)
        if self._key is not None:
            self._key.append(text[at:end])
        if not self._is_in_string:
            self._end_string(text, end)
        return end

    def _end_string(self, text: str, end: int) -> None:
        if not self._is_key:
            self._end_value(text, end)
            return
        self._expects = _Expects.COLON
        if self._key is not None:
            self._name = json.loads("".join(self._key))
            self._key = None


def _unexpected(character: str) -> ValueError:
    return ValueError(f"{character!r} cannot come here")
