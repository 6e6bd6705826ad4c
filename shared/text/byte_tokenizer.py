"""The tokenizer of random and synthetic models, which have no vocabulary of their own: one token for each byte.

ids 0..255 are the bytes, 256 ends a text, 257 begins one. Such models sample from their whole vocabulary, so every id
from 258 on shows as one lower-case letter: each token can be seen in the output.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING

from shared.errors import InvalidRequestError, ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ByteTokenizer"]

_EOS_ID, _BOS_ID = 256, 257
_SPECIAL_TOKENS = {"<|eos|>": _EOS_ID, "<|bos|>": _BOS_ID}
_SPECIAL_PATTERN = re.compile("(" + "|".join(map(re.escape, _SPECIAL_TOKENS)) + ")")
_MIN_VOCAB_SIZE = 258
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


class ByteTokenizer:
    """Implements `shared.text.tokenizer.Tokenizer` for any vocabulary of at least 258 ids."""

    bos_token = "<|bos|>"  # noqa: S105 - a token of text
    eos_token = "<|eos|>"  # noqa: S105 - a token of text
    eos_token_ids = frozenset({_EOS_ID})
    special_tokens: Mapping[int, str] = MappingProxyType({token_id: text for text, token_id in _SPECIAL_TOKENS.items()})
    chat_templates: Mapping[str, str] = MappingProxyType({"default": _CHAT_TEMPLATE})
    strips_leading_space = False

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < _MIN_VOCAB_SIZE:
            raise ModelError(f"a vocabulary of {vocab_size} is too small for bytes; it takes {_MIN_VOCAB_SIZE} ids")
        self.vocab_size = vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """The begin token, then one id for each byte of the UTF-8 form."""
        token_ids = [_BOS_ID] if add_special_tokens else []
        try:
            for piece in _SPECIAL_PATTERN.split(text) if parse_special else [text]:
                special = _SPECIAL_TOKENS.get(piece) if parse_special else None
                token_ids.extend(piece.encode() if special is None else [special])
        except UnicodeEncodeError as error:
            raise InvalidRequestError("the text has a lone surrogate, which no UTF-8 text can have") from error
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, bytes that are not UTF-8 as U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The byte, nothing for the two special tokens, a letter for all other ids."""
        if 0 <= token_id < 256:
            return bytes([token_id])
        if token_id in self.special_tokens or not 0 <= token_id < self.vocab_size:
            return b""
        return bytes([ord("a") + token_id % 26])
