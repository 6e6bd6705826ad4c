"""Server-sent events from the bytes of a stream, as far as OpenAI's API uses them: one line of data for each event.

Does no I/O, and does not know what the data means.
"""

from __future__ import annotations

from shared.errors import ProtocolError

__all__ = ["EventStream"]

_MAX_LINE_BYTES = 4 << 20


class EventStream:
    """Puts lines together again and gives the data of those that have any."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that are whole now.

        Raises:
            ProtocolError: a line has no end.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            raise ProtocolError(f"a line of the event stream has more than {_MAX_LINE_BYTES} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
