"""Prompts as token ids, each beginning with the model's begin token exactly once if the model wants one.

Knows that a text, or a template, may spell the begin token where the tokenizer adds it as well. Ids that a client sends
never come here: they are taken as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.text.tokenizer import Tokenizer

__all__ = ["encode_conversation", "encode_text"]


def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The ids of a text to continue. Raises ``InvalidRequestError`` for lone surrogates.

    Text that spells the begin token gets no second one.
    """
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] and _is_begin(tokenizer, ids[0]):
        del ids[0]
    return ids


def encode_conversation(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of what a chat template gave. Raises ``InvalidRequestError`` for lone surrogates.

    A template that leaves the begin token out, for a model that wants one, gets it.
    """
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    begin = tokenizer.encode("")[:1]
    if begin and ids[:1] != begin and _is_begin(tokenizer, begin[0]):
        return begin + ids
    return ids


def _is_begin(tokenizer: Tokenizer, token_id: int) -> bool:
    return tokenizer.bos_token is not None and tokenizer.special_tokens.get(token_id) == tokenizer.bos_token
