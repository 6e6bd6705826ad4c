"""A model's vocabulary as the library llguidance takes it, and grammars over it.

Gateways check grammars and workers follow them with what is made here, so that both come to the same verdict::

    vocabulary = GuidanceVocabulary.of(tokenizer, vocab_size=engine.vocab_size)
    tokens = vocabulary.library_tokenizer(encode=tokenizer.encode)   # once for a model: 0.3 s for 50,000 tokens
    matcher = guidance_matcher(tokens, submit.grammar)                # once for a sequence
    matcher.compute_bitmask()                                         # one bit for each id of the model's vocabulary
    matcher.consume_token(token_id)                                   # what was sampled

Knows what each token adds to the text (`Tokenizer.token_bytes`), and that a special token adds nothing and is allowed
only where a grammar names it (``<|name|>`` or ``<[id]>``) or, if it ends a text, where a match may end. Does not know
what a request looks like, nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.errors import InvalidRequestError, ModelError

if TYPE_CHECKING:
    from shared.text.tokenizer import Tokenizer

__all__ = ["Encode", "GuidanceVocabulary", "guidance_matcher"]

_MAX_CANONICAL_CHARACTERS = 256
"""Of text that a grammar forces, so much is tokenized as the model would: it is done for each token anew."""
_MAX_LEADING_TOKENS = 3
_MAX_LEXER_STATES = 20_000
"""Of one sequence; 1 to 2 KB each. Ordinary JSON schemas take some hundred."""


class Encode(Protocol):
    """`Tokenizer.encode`."""

    def __call__(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        """The ids of ``text``."""


@dataclass(frozen=True, slots=True)
class GuidanceVocabulary:
    """What each id of a model stands for."""

    tokens: tuple[bytes, ...]
    """What each token adds to the text, by id; of a special token how it is spelled, of an unknown id nothing."""
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    """Those of them that end a text."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> GuidanceVocabulary:
        """The vocabulary of a model of ``vocab_size`` ids, which may be fewer or more than the tokenizer's.

        Raises:
            ModelError: the model has no token that ends a text.
        """
        eos_ids = sorted(token_id for token_id in tokenizer.eos_token_ids if token_id < vocab_size)
        if not eos_ids:
            raise ModelError("the model has no token that ends a text, and hence nothing to end a match with")
        # A token that ends a text ends it inside of a string, too, even where it is an ordinary token to the tokenizer.
        spellings = {token_id: tokenizer.token_bytes(token_id) for token_id in eos_ids}
        spellings |= {
            token_id: spelling.encode()
            for token_id, spelling in tokenizer.special_tokens.items()
            if token_id < vocab_size
        }
        tokens = [spellings.get(token_id, b"") or tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        return cls(tuple(tokens), tuple(sorted(spellings)), tuple(eos_ids))

    def library_tokenizer(self, encode: Encode | None = None) -> LLTokenizer:
        """The library's view of it.

        Text that a grammar forces is tokenized as ``encode`` does it, the model's own way; without ``encode`` byte by
        byte, which is good enough for looking at a grammar.

        Raises:
            ModelError: the library cannot take this vocabulary.
        """
        try:
            return LLTokenizer(_Wrapper(self, encode), n_vocab=len(self.tokens), eos_token=list(self.eos_ids))  # type: ignore[arg-type]
        except ValueError as error:
            raise ModelError(f"this model's vocabulary cannot follow grammars: {error}") from error


def guidance_matcher(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """The state of ``grammar`` before the first token; its work for each token is bounded.

    Raises:
        InvalidRequestError: the grammar is no good; the message has the library's reason.
    """
    limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise InvalidRequestError(matcher.get_error().removesuffix("\n<non-verbose/>"))
    return matcher


class _Wrapper:
    """What the library asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: GuidanceVocabulary, encode: Encode | None) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.eos_ids[0]
        special = frozenset(vocabulary.special_ids)
        self._id_of_byte = {
            token[0]: token_id
            for token_id, token in enumerate(vocabulary.tokens)
            if len(token) == 1 and token_id not in special
        }
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        """Ids whose bytes are exactly those of ``text``."""
        head, tail = text[:_MAX_CANONICAL_CHARACTERS], text[_MAX_CANONICAL_CHARACTERS:]
        ids = self._canonical(head)
        if ids is None:
            ids = self._byte_by_byte(head)
        return ids + self._byte_by_byte(tail)

    def _canonical(self, text: str) -> list[int] | None:
        """As the model's tokenizer has it in the middle of a text, None where that cannot be told."""
        if self._encode is None:
            return None
        wanted = text.encode()
        for before in ("", "\n"):
            # SentencePiece puts a space before a text, and that space comes off with the line feed.
            ids = self._encode(before + text, add_special_tokens=False, parse_special=False)
            parts = [self.tokens[token_id] if token_id < len(self.tokens) else b"" for token_id in ids]
            for start in range(min(_MAX_LEADING_TOKENS, len(ids)) + 1):
                if b"".join(parts[start:]) == wanted:
                    return ids[start:]
        return None

    def _byte_by_byte(self, text: str) -> list[int]:
        return [self._id_of_byte[byte] for byte in text.encode()]
