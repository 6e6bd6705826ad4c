"""Log probabilities as clients see them: the engine's numbers beside the tokens' text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.generation import TokenLogprob, TopLogprob

if TYPE_CHECKING:
    from shared.messages import TokenLogprobs
    from shared.text.tokenizer import Tokenizer

__all__ = ["token_logprob"]


def token_logprob(
    tokenizer: Tokenizer, token_id: int, token_bytes: bytes, logprobs: TokenLogprobs | None
) -> TokenLogprob:
    """Describe a token that adds ``token_bytes`` to the text; ``logprobs`` None: nothing predicts it."""
    token = _spelling(tokenizer, token_id, token_bytes)
    if logprobs is None:
        return TokenLogprob(token_id, token, token_bytes, None)
    top = tuple(_top_logprob(tokenizer, other_id, logprob) for other_id, logprob in logprobs.top)
    return TokenLogprob(token_id, token, token_bytes, logprobs.logprob, top)


def _top_logprob(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    token_bytes = tokenizer.token_bytes(token_id)
    return TopLogprob(token_id, _spelling(tokenizer, token_id, token_bytes), token_bytes, logprob)


def _spelling(tokenizer: Tokenizer, token_id: int, token_bytes: bytes) -> str:
    """The bytes as text; a special token, which has none, as the vocabulary writes it."""
    return tokenizer.special_tokens.get(token_id) or token_bytes.decode("utf-8", errors="replace")
