"""Log probabilities: of more than one seam."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.codec.columns import check_columns
from shared.messages import PromptLogprobs, TokenLogprobs
from shared.pb import common_pb2

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["indexed_from_pb", "logprobs_from_pb", "logprobs_to_pb", "prompt_logprobs_from_pb"]


def logprobs_to_pb(tokens: Collection[TokenLogprobs]) -> common_pb2.LogprobColumns | None:
    """Translate; None where there are no tokens."""
    if not tokens:
        return None
    return common_pb2.LogprobColumns(
        logprobs=[token.logprob for token in tokens],
        num_top=[len(token.top) for token in tokens],
        top_token_ids=[token_id for token in tokens for token_id, _ in token.top],
        top_logprobs=[logprob for token in tokens for _, logprob in token.top],
    )


def logprobs_from_pb(message: common_pb2.LogprobColumns) -> tuple[TokenLogprobs, ...]:
    """Translate; columns that disagree are refused."""
    check_columns("logprobs", ("logprobs", len(message.logprobs)), ("num_top", len(message.num_top)))
    check_columns(
        "logprobs",
        ("sum of num_top", sum(message.num_top)),
        ("top_token_ids", len(message.top_token_ids)),
        ("top_logprobs", len(message.top_logprobs)),
    )
    top = zip(message.top_token_ids, message.top_logprobs, strict=True)
    return tuple(
        TokenLogprobs(logprob, tuple(next(top) for _ in range(num_top)))
        for logprob, num_top in zip(message.logprobs, message.num_top, strict=True)
    )


def indexed_from_pb(indices: Collection[int], message: common_pb2.LogprobColumns) -> dict[int, TokenLogprobs]:
    """Return log probabilities by the index of their token."""
    if not indices and not message.ByteSize():  # as good as always
        return {}
    keys, tokens = list(indices), logprobs_from_pb(message)
    check_columns("logprobs", ("logprob_indices", len(keys)), ("logprobs", len(tokens)))
    return dict(zip(keys, tokens, strict=True))


def prompt_logprobs_from_pb(first_position: int, message: common_pb2.LogprobColumns) -> PromptLogprobs:
    """Translate."""
    return PromptLogprobs(first_position, logprobs_from_pb(message))
