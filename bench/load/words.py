"""Prompts as text, for endpoints that take no token ids.

There is no tokenizer here: a token id becomes a common English word, which with its blank is one token of most
vocabularies. So lengths are about right, prefixes that are shared stay shared, and the server tells the exact number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NUM_WORDS", "text_of"]

_COMMON = """
the of and to in is that it was for on are with as his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would
other into has more her two like him see time could no make than first been its who now people my made over did down
only way find use may water long little very after words called just where most know get through back much before go
good new write our used me man too any day same right look think also around another came come work three word must
because does part even place well such here take why things help put years different away again off went old number
great tell men say small every found still between name should home big give air line set own under read last never us
left end along while might next sound below saw something thought both few those always looked show large often
together asked house world going want school important until form food keep children feet land side without boy once
animals life enough took four head above kind began almost live page got earth need far hand high year mother light
parts country father let night following picture being study second eyes soon times story boys since white days ever
paper hard near sentence better best across during today others however sure means knew try told young miles sun ways
thing whole hear example heard several change
"""
_WORDS = tuple(_COMMON.split())

NUM_WORDS = len(_WORDS)
"""Ids from here on begin with the words again."""


def text_of(token_ids: Sequence[int]) -> str:
    """Return as many words as there are ids."""
    return " ".join(_WORDS[token_id % NUM_WORDS] for token_id in token_ids)
