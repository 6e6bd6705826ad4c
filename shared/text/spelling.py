"""How a vocabulary spells bytes: from a token as the vocabulary writes it to the bytes that it adds to the text.

Knows the two spellings of the model families that are served. Does not know token ids nor which tokens are special.

- *byte level* (GPT-2, Llama 3, Qwen, SmolLM): each of the 256 bytes has its own printable character.
- *byte fallback* (SentencePiece: Llama 2, Mistral): ``▁`` is a space, ``<0x0A>`` is the byte 10, all else is itself.
"""

from __future__ import annotations

import re

__all__ = ["BYTE_LEVEL_CHARACTERS", "byte_fallback_bytes", "byte_level_bytes"]


def _byte_level_characters() -> tuple[str, ...]:
    # GPT-2's table: printable Latin-1 bytes stand for themselves, the others for the characters from U+0100 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


BYTE_LEVEL_CHARACTERS = _byte_level_characters()
"""The character that stands for each byte in a byte-level vocabulary."""

_BYTE_OF_CHARACTER = {character: byte for byte, character in enumerate(BYTE_LEVEL_CHARACTERS)}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; a token with any character outside the table is text (an added token)."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def byte_fallback_bytes(token: str) -> bytes:
    """The bytes of a SentencePiece token."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(match[1])
    return token.replace("▁", " ").encode()
