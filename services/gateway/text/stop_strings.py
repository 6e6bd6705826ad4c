"""Texts that end an output, found while it is still being written.

The match that is complete first wins, whatever the list's order; of several that are complete with the same character,
the longest. Thus an output ends the same way however its tokens come in, and nothing waits for what a longer stop
string might still become. Strings are compared as bytes: UTF-8 synchronizes itself, so a match of bytes is one of
characters, wherever tokens or broken characters are cut.

Each string has an automaton of Knuth, Morris and Pratt ("Fast pattern matching in strings", 1977): time grows with the
output's length, never with how often a match begins. While nothing has begun, the search for a string's first byte is
the interpreter's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["StopMatch", "StopMatcher", "StopStrings"]


class _Pattern:
    """One string; a state is how many of its bytes the text ends with."""

    __slots__ = ("_borders", "target", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.target = text.encode()
        self._borders = _borders(self.target)

    def advance(self, state: int, data: bytes, end: int, *, accept: bool) -> tuple[int, int]:
        """Read ``data[:end]``; return the new state and how much was read, which is less after a match only."""
        target, borders, size = self.target, self._borders, len(self.target)
        place = 0
        while place < end:
            if state == 0:
                place = data.find(target[0], place, end)
                if place < 0:
                    return 0, end
                state = 1
            else:
                byte = data[place]
                while state and target[state] != byte:
                    state = borders[state]
                state += target[state] == byte
            place += 1
            if state == size:
                if accept:
                    return state, place
                state = borders[state]
        return state, end


def _borders(target: bytes) -> list[int]:
    """For each length of a beginning: how long its longest other beginning is that it also ends with."""
    borders = [0, 0]
    length = 0
    for byte in target[1:]:
        while length and target[length] != byte:
            length = borders[length]
        length += target[length] == byte
        borders.append(length)
    return borders


class StopMatch(NamedTuple):
    """Where a stop string is."""

    text: str
    num_bytes: int
    end: int
    """One past its last byte, counted from the beginning of what was read last; it may begin before that."""


class StopStrings:
    """The stop strings of a request; none of them is empty. Matchers share them."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._patterns = [_Pattern(text) for text in dict.fromkeys(texts)]

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def matcher(self) -> StopMatcher:
        """Return a matcher for one output."""
        return StopMatcher(self._patterns)


class StopMatcher:
    """Reads one output until it stops."""

    __slots__ = ("_patterns", "_states")

    def __init__(self, patterns: Sequence[_Pattern]) -> None:
        self._patterns = patterns
        self._states = [0] * len(patterns)

    @property
    def num_held_bytes(self) -> int:
        """Length of the longest end of what was read that a stop string begins with."""
        return max(self._states)

    def read(self, data: bytes, *, accept: bool = True) -> StopMatch | None:
        """Read on; return the first match. Without ``accept``, matches are text like any other."""
        end = len(data)
        found: _Pattern | None = None
        for index, pattern in enumerate(self._patterns):
            state, read = pattern.advance(self._states[index], data, end, accept=accept)
            self._states[index] = state
            if state == len(pattern.target) and (found is None or read < end or state > len(found.target)):
                found, end = pattern, read
        return None if found is None else StopMatch(found.text, len(found.target), end)
