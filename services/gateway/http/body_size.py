"""How much JSON a body may hold, counted before anything is built of it.

Eight megabytes can be millions of lists or keys: hundreds of megabytes of objects, and seconds in which no token moves.
What clients really send in so many bytes is text and token ids. Knows JSON's marks and its strings; does not say
whether it is valid.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MAX_CONTAINERS", "MAX_ITEMS", "MAX_KEYS", "overload"]

MAX_KEYS = 1 << 15
MAX_CONTAINERS = 1 << 16
"""Lists and objects."""
MAX_ITEMS = 1 << 20
"""Of all lists and objects: as many as token ids may be."""

_LIMITS = ((b":", MAX_KEYS, "keys"), (b"[{", MAX_CONTAINERS, "lists and objects"), (b",", MAX_ITEMS, "items"))
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""One that does not end is taken to the end: each byte is looked at once, whatever they are."""


def overload(data: bytes | bytearray) -> str | None:
    """Return what ``data`` has too much of, and the limit; None where it is within all."""
    if all(_count(data, marks) <= limit for marks, limit, _ in _LIMITS):
        return None  # not even with the marks in its texts
    counts = [0] * len(_LIMITS)
    for part in _outside_strings(data):
        for index, (marks, limit, name) in enumerate(_LIMITS):
            counts[index] += _count(part, marks)
            if counts[index] > limit:
                return f"more than {limit} {name}"
    return None


def _outside_strings(data: bytes | bytearray) -> Iterator[bytes | bytearray]:
    start = 0
    for string in _STRING.finditer(data):
        yield data[start : string.start()]
        start = string.end()
    yield data[start:]


def _count(data: bytes | bytearray, marks: bytes) -> int:
    return sum(map(data.count, marks))
