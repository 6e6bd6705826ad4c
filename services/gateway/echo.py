"""The prompt as the beginning of a choice.

A long prompt with log probabilities comes in several deltas: one message must not hold up all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.gateway.logprobs import token_logprob
from services.gateway.text.detokenizer import Detokenizer
from shared.generation import Delta

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from services.gateway.jobs import Prompt
    from shared.messages import TokenLogprobs
    from shared.text.tokenizer import Tokenizer

__all__ = ["MAX_ENTRIES", "echoed_prompt"]

MAX_ENTRIES = 4096
"""Log probabilities in one delta, those of other tokens counted."""


def echoed_prompt(
    prompt: Prompt,
    choice: int,
    tokenizer: Tokenizer,
    logprobs: Sequence[TokenLogprobs | None] | None,
    num_top: int,
) -> Iterator[Delta]:
    """Give the deltas of a prompt, one after the other; the first one has all the text.

    Text is as the client wrote it, or the ids decoded. ``logprobs``, with ``num_top`` others each, are those of the
    prompt's tokens; nothing predicts the first one. None: not asked for.
    """
    ids = prompt.token_ids.tolist()
    text = tokenizer.decode(ids) if prompt.text is None else prompt.text
    if logprobs is None:
        yield Delta(text, tuple(ids), choice=choice, is_prompt=True)
        return
    detokenizer = Detokenizer(tokenizer)
    size = max(1, MAX_ENTRIES // (1 + num_top))
    for begin in range(0, len(ids), size):
        some = ids[begin : begin + size]
        entries = tuple(
            token_logprob(tokenizer, token_id, part, logprobs[begin + index])
            for index, (token_id, part) in enumerate(zip(some, detokenizer.parts(some), strict=True))
        )
        yield Delta(text, tuple(some), choice=choice, logprobs=entries, is_prompt=True)
        text = ""
