"""A model that knows nothing but the mask: what it writes shows what a grammar allows."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from shared.text.guidance_vocabulary import GuidanceVocabulary, guidance_matcher

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from shared.text.tokenizer import Tokenizer

__all__ = ["GuidedWalker", "allowed_ids"]

_CLOSERS = (b"}", b"]", b'"', b":", b"0", b">")
"""What brings JSON to an end, best first."""


def allowed_ids(matcher: LLMatcher, vocab_size: int) -> list[int]:
    """The ids that the mask allows next."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    assert not matcher.is_error(), matcher.get_error()
    found: list[int] = np.flatnonzero(np.unpackbits(bits, bitorder="little")[:vocab_size]).tolist()
    return found


class GuidedWalker:
    """Writes at random what grammars over one vocabulary allow."""

    def __init__(self, tokenizer: Tokenizer, *, num_padding: int = 7) -> None:
        """``num_padding`` are ids of the model that the tokenizer does not know."""
        self.vocab_size = tokenizer.vocab_size + num_padding
        self.vocabulary = GuidanceVocabulary.of(tokenizer, self.vocab_size)
        self.library: LLTokenizer = self.vocabulary.library_tokenizer(tokenizer.encode)
        self._tokenizer = tokenizer

    def write(self, grammar: str, seed: int, *, num_wild: int = 40, max_tokens: int = 2000) -> list[int]:
        """Token ids up to the one that ends the text; after ``num_wild`` it hurries to an end."""
        generator = random.Random(seed)
        matcher = guidance_matcher(self.library, grammar)
        ids: list[int] = []
        while True:
            allowed = allowed_ids(matcher, self.vocab_size)
            if len(ids) >= num_wild:
                allowed = self._closing(allowed)
            token_id = generator.choice(allowed)
            if token_id in self.vocabulary.eos_ids:
                assert matcher.is_accepting()
                return ids
            ids.append(token_id)
            assert matcher.consume_token(token_id)
            assert len(ids) < max_tokens, self.text(ids)

    def text(self, ids: list[int]) -> str:
        """What the client sees of them."""
        return b"".join(map(self._tokenizer.token_bytes, ids)).decode()

    def _closing(self, allowed: list[int]) -> list[int]:
        ends = [token_id for token_id in allowed if token_id in self.vocabulary.eos_ids]
        if ends:
            return ends
        by_part = {self.vocabulary.tokens[token_id]: token_id for token_id in allowed}
        in_string = b"Q" in by_part
        closers = (b'"', *_CLOSERS) if in_string else _CLOSERS
        return next(([by_part[closer]] for closer in closers if closer in by_part), allowed)
