"""Token ids in, text out, piece by piece: only whole characters are ever given out, and nothing of a stop string.

Tokens go out with their text: each with the piece in which its last byte is decided. Knows one sequence's bytes that
do not make a character yet (three at most), and those that may become a stop string. Does not know requests.

Invariants: the texts of all pieces, joined, are `Tokenizer.decode` of all ids, up to the stop string; so are the bytes
of all pieces, joined and decoded. Bytes that can no longer become a character are given out as U+FFFD at once (the
first two of a surrogate's three with the next byte); the cost of a token does not depend on how many came before.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from services.gateway.text.stop_strings import StopMatch, StopStrings
    from shared.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Piece"]


class Piece(NamedTuple):
    """Text, and the tokens that it completes: it may begin in a token that is not among them."""

    text: str
    token_ids: list[int]
    token_bytes: list[bytes]
    """What each token adds to the text; what a stop string takes away is missing."""


class Detokenizer:
    """The text of one sequence, as far as its tokens are known."""

    __slots__ = (
        "_at_beginning",
        "_bytes_of",
        "_held",
        "_held_tokens",
        "_matcher",
        "_num_given",
        "_num_lenient",
        "stop",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: StopStrings | None = None,
        *,
        min_tokens: int = 0,
        continues: bool = False,
        markers: Mapping[int, str] | None = None,
    ) -> None:
        """``stops`` count from the token on that makes ``min_tokens``.

        ``continues``: the text goes on from another one, so that a leading space is its own. ``markers`` are special
        tokens that are text in this one.
        """
        self._bytes_of = tokenizer.token_bytes
        if markers:
            spelled = {token_id: text.encode() for token_id, text in markers.items()}
            self._bytes_of = lambda token_id: spelled.get(token_id) or tokenizer.token_bytes(token_id)
        self._at_beginning = tokenizer.strips_leading_space and not continues
        self._matcher = stops.matcher() if stops else None
        self._num_lenient = max(0, min_tokens - 1)
        """Tokens to come in which a stop string is text like any other."""
        self._held = b""
        """Bytes that are not decided: the end of the bytes of ``_held_tokens``."""
        self._held_tokens: deque[tuple[int, bytes]] = deque()
        self._num_given = 0
        """Bytes of the first held token that have been given out."""
        self.stop: str | None = None
        """The stop string that ended the text: tokens after it are dropped."""

    def parts(self, token_ids: Iterable[int]) -> list[bytes]:
        """Return what these tokens, the next ones, add to the text, without taking them in."""
        parts = [*map(self._bytes_of, token_ids)]
        if self._at_beginning:
            self._strip_leading_space(parts)
        return parts

    def push(self, token_ids: list[int]) -> Piece:
        """Give what these tokens complete; may be nothing."""
        parts = self.parts(token_ids)
        if self._matcher is None and not self._held_tokens:  # as good as always
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            text, num_decided = _decode(data, final=False)
            if num_decided == len(data):
                return Piece(text, token_ids, parts)
        return self._push(token_ids, parts)

    def finish(self) -> Piece:
        """Give what is left when no token follows; an unfinished character is U+FFFD."""
        text, _ = _decode(self._held, final=True)
        piece = Piece(text, [token_id for token_id, _ in self._held_tokens], [part for _, part in self._held_tokens])
        self._drop_held()
        return piece

    def _push(self, token_ids: list[int], parts: list[bytes]) -> Piece:
        if self.stop is not None:
            return Piece("", [], [])
        before = len(self._held)
        data = self._held + b"".join(parts)
        self._held_tokens.extend(zip(token_ids, parts, strict=True))
        match = self._find_stop(parts)
        if match is not None:
            return self._cut(data, before + match.end - match.num_bytes, before + match.end, match.text)
        num_safe = len(data) - (0 if self._matcher is None else self._matcher.num_held_bytes)
        # What may be a stop string begins with a character, which ends an unfinished one before it.
        text, num_decided = _decode(data[:num_safe], final=num_safe < len(data))
        self._held = data[num_decided:]
        return self._give(text, num_decided)

    def _find_stop(self, parts: list[bytes]) -> StopMatch | None:
        """Read new tokens; the match's end counts from the first of them."""
        if self._matcher is None:
            return None
        num_lenient = min(self._num_lenient, len(parts))
        self._num_lenient -= num_lenient
        lenient = b"".join(parts[:num_lenient])
        self._matcher.read(lenient, accept=False)
        match = self._matcher.read(b"".join(parts[num_lenient:]))
        return None if match is None else match._replace(end=match.end + len(lenient))

    def _give(self, text: str, num_decided: int) -> Piece:
        """Take out the tokens whose last byte is among the next ``num_decided`` ones."""
        held, ids, parts = self._held_tokens, [], []
        left = self._num_given + num_decided
        while held and len(held[0][1]) <= left:
            token_id, part = held.popleft()
            left -= len(part)
            ids.append(token_id)
            parts.append(part)
        self._num_given = left
        return Piece(text, ids, parts)

    def _cut(self, data: bytes, start: int, end: int, stop: str) -> Piece:
        """End the text at ``start`` of the undecided bytes, with the token that has the last byte before ``end``."""
        text, _ = _decode(data[:start], final=True)
        ids, parts = [], []
        place = -self._num_given
        while place < end:
            token_id, part = self._held_tokens.popleft()
            ids.append(token_id)
            parts.append(part[: max(0, start - place)])
            place += len(part)
        self._drop_held()
        self.stop = stop
        return Piece(text, ids, parts)

    def _drop_held(self) -> None:
        self._held = b""
        self._held_tokens.clear()
        self._num_given = 0

    def _strip_leading_space(self, parts: list[bytes]) -> None:
        for index, part in enumerate(parts):
            if part:
                self._at_beginning = False
                parts[index] = part.removeprefix(b" ")
                return


def _decode(data: bytes, *, final: bool) -> tuple[str, int]:
    """Return the text and how many bytes it took: all but an unfinished character at the end, which may go on."""
    return utf_8_decode(data, "replace", final)
