"""How likely the tokens of a prompt were: each scored by the logits of the place before it, piece after piece.

Nothing predicts a prompt's first token, and the logits of its last one belong to the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from services.worker.sampling.logprobs import Scores, score
from shared.messages import PromptLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["PromptPiece", "PromptScores", "score_prompt"]

_MAX_ROWS = 32
"""Logits made at a time, which bounds the memory: a vocabulary of 128 k takes 1 MiB a row and array."""


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """The n tokens of one sequence's prompt that an iteration predicts."""

    place: int
    """Of the sequence in the plan's columns."""
    first_position: int
    """Of the first of them in the prompt, at least 1."""
    first_row: int
    """Of the activations that predict them, one after the other."""
    token_ids: Tensor
    """[n] int64"""
    num_top: int


class PromptScores(NamedTuple):
    """A piece with its log probabilities."""

    piece: PromptPiece
    scores: list[Scores]
    """One after the other."""

    def message(self) -> PromptLogprobs:
        """Return what is told of it."""
        tokens = [
            logprobs
            for scores in self.scores
            for logprobs in scores.messages([self.piece.num_top] * len(scores.logprobs))
        ]
        return PromptLogprobs(self.piece.first_position, tuple(tokens))


def score_prompt(piece: PromptPiece, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> PromptScores:
    """Score a piece by the iteration's activations [num_tokens, hidden_size].

    ``logits_of`` is the stage's, which all ranks of the stage call together, with the same shapes.
    """
    rows = hidden[piece.first_row : piece.first_row + len(piece.token_ids)]
    scores = [
        score(logits_of(some), token_ids, piece.num_top)
        for some, token_ids in zip(torch.split(rows, _MAX_ROWS), torch.split(piece.token_ids, _MAX_ROWS), strict=True)
    ]
    return PromptScores(piece, scores)
