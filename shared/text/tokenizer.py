"""What the gateway asks of a tokenizer, and which one goes with a model.

Knows the kinds of model sources. How each is read is in `hf_folder`, `gguf_vocabulary` and `byte_tokenizer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from shared.model.shapes import named_shape
from shared.model.source import GgufFile, HfFolder, ModelSource, RandomModel, SyntheticModel
from shared.text.byte_tokenizer import ByteTokenizer
from shared.text.gguf_vocabulary import load_gguf_tokenizer
from shared.text.hf_folder import load_hf_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shared.text.gguf_vocabulary import TextRules

__all__ = ["Tokenizer", "load_tokenizer"]


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that the tokenizer knows; the model's own vocabulary may be padded beyond it."""

    @property
    def bos_token(self) -> str | None:
        """The token that begins a text, as templates spell it."""

    @property
    def eos_token(self) -> str | None:
        """The token that ends a text, as templates spell it."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """All ids that end a generation."""

    @property
    def special_tokens(self) -> Mapping[int, str]:
        """Ids that add nothing to the text, and how templates spell them."""

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The Jinja templates that the model came with, by name: "default" and, with some models, "tool_use"."""

    @property
    def strips_leading_space(self) -> bool:
        """Whether one space at the very beginning of a decoded text is the vocabulary's, not the text's."""

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of ``text``.

        Args:
            text: any text.
            add_special_tokens: put the model's begin (and end) token around it, if its files say so. False for the
                output of a chat template, which writes them itself.
            parse_special: text that spells a special token, such as ``<|im_start|>``, becomes that token, as in
                transformers; False makes it ordinary text, for text that must not be able to forge a turn.

        Raises:
            InvalidRequestError: the text has lone surrogates and hence no UTF-8 form.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids`` without special tokens; bytes that are not UTF-8 become U+FFFD."""

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text: empty for special tokens and for ids that the vocabulary has not."""


def load_tokenizer(source: ModelSource, *, rules: TextRules = "transformers") -> Tokenizer:
    """The tokenizer that goes with a model; ``rules`` matter for GGUF files only (see `gguf_vocabulary`).

    Raises:
        ModelError: the files are missing, damaged or of a kind that is not supported.
    """
    match source:
        case HfFolder(path):
            return load_hf_tokenizer(path)
        case GgufFile(path):
            return load_gguf_tokenizer(path, rules=rules)
        case RandomModel(shape, _):
            return ByteTokenizer(named_shape(shape).vocab_size)
        case SyntheticModel():
            return ByteTokenizer(source.vocab_size)
