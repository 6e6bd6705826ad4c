"""Token ids in, text out, piece by piece: only whole characters are ever given out.

Knows one sequence's bytes that do not make a character yet (three at most). Does not know stop strings nor requests.

Invariant: all pieces that `push` and `finish` gave, joined, are `Tokenizer.decode` of all ids. Bytes that can no longer
become a character are given out as U+FFFD at once (the first two of a surrogate's three with the next byte); the cost
of a token does not depend on how many came before.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shared.text.tokenizer import Tokenizer

__all__ = ["Detokenizer"]


class Detokenizer:
    """The text of one sequence, as far as its tokens are known."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_beginning = tokenizer.strips_leading_space

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete; may be empty."""
        return self._piece(b"".join(map(self._token_bytes, token_ids)), final=False)

    def finish(self) -> str:
        """What is left when no token follows: U+FFFD for an unfinished character, else the empty string."""
        return self._piece(b"", final=True)

    def _piece(self, data: bytes, *, final: bool) -> str:
        piece = self._decoder.decode(data, final)
        if self._at_beginning and piece:
            self._at_beginning = False
            return piece.removeprefix(" ")
        return piece
