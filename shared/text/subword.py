"""A tokenizer over the `tokenizers` library, wherever its vocabulary came from.

Knows how to encode, and how ids become bytes. Does not know files (`hf_folder`, `gguf_vocabulary`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import tokenizers

__all__ = ["SpecialTokens", "SubwordTokenizer"]


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What a model's files say beside the vocabulary."""

    bos_token: str | None
    eos_token: str | None
    eos_token_ids: frozenset[int]
    chat_templates: Mapping[str, str]
    """By name."""


class SubwordTokenizer:
    """Implements `shared.text.tokenizer.Tokenizer`.

    Decoding does not go through the library: text is the tokens' bytes joined, which is what its byte-level decoder
    does and what can be streamed. For SentencePiece vocabularies the two differ in text that is not valid UTF-8 only
    (the library then replaces valid neighbours, too).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: SpecialTokens,
        *,
        spelling: Callable[[str], bytes],
        strips_leading_space: bool,
    ) -> None:
        """``spelling`` gives the bytes of a token as the vocabulary writes it (`shared.text.spelling`)."""
        self.bos_token = special.bos_token
        self.eos_token = special.eos_token
        self.eos_token_ids = special.eos_token_ids
        self.chat_templates = special.chat_templates
        self.strips_leading_space = strips_leading_space
        added = backend.get_added_tokens_decoder()
        self.special_tokens = {token_id: token.content for token_id, token in added.items() if token.special}
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._backend = backend
        self._encode_lock = threading.Lock()
        self._spelling = spelling
        self._bytes_of: dict[int, bytes] = dict.fromkeys(self.special_tokens, b"")

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of ``text``; see the protocol."""
        try:
            with self._encode_lock:  # the library keeps this option in the tokenizer, not in the call
                self._backend.encode_special_tokens = not parse_special
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError("the text has a lone surrogate, which no UTF-8 text can have") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids without special tokens, bytes that are not UTF-8 as U+FFFD."""
        text = b"".join(map(self.token_bytes, token_ids)).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text; looked up once for each id."""
        found = self._bytes_of.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            if token is None:
                return b""
            found = self._bytes_of[token_id] = self._spelling(token)
        return found
