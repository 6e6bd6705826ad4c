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
    """Describe a token that adds ``token_bytes`` to the text; None where nothing predicts it."""
    if logprobs is None:
        return TokenLogprob(token_id, _text(token_bytes), token_bytes, None)
    top = tuple(_top_logprob(tokenizer, other_id, logprob) for other_id, logprob in logprobs.top)
    return TokenLogprob(token_id, _text(token_bytes), token_bytes, logprobs.logprob, top)


def _top_logprob(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    token_bytes = tokenizer.token_bytes(token_id)
    return TopLogprob(token_id, _text(token_bytes), token_bytes, logprob)


def _text(token_bytes: bytes) -> str:
    return token_bytes.decode("utf-8", errors="replace")
