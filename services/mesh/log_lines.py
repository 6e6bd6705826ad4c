"""A line that a service wrote: a JSON event of ``shared.log``, or whatever a library printed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LineSplitter", "LogLine", "parse_line"]

MAX_LINE_BYTES = 1 << 16
"""A longer line is cut into pieces: nothing that a process writes fills the supervisor's memory."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of output."""

    service: str
    """Name of the process within the mesh."""
    text: str
    """The line as it was written."""
    event: str | None = None
    """Name of the event; None for a raw line."""
    level: str = "info"
    fields: Mapping[str, object] = field(default_factory=dict)
    """The event's other keys; ``exception`` is a traceback of many lines."""


def parse_line(service: str, text: str) -> LogLine:
    """Read a line; what is not a JSON event is a raw line."""
    if text.startswith("{"):
        try:
            fields = json.loads(text)
        except ValueError:
            return LogLine(service, text)
        if isinstance(fields, dict) and isinstance(event := fields.pop("event", None), str):
            level = str(fields.pop("level", "info"))
            return LogLine(service, text, event, level, fields)
    return LogLine(service, text)


class LineSplitter:
    """Cuts a stream of bytes into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that ``data`` completes, without their ends."""
        *complete, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > MAX_LINE_BYTES:
            complete.append(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        return [_decode(line) for line in complete]

    def end(self) -> list[str]:
        """Return the last line where it had no end."""
        rest, self._rest = self._rest, b""
        return [_decode(rest)] if rest else []


def _decode(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r")
