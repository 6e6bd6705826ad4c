"""One token for each sequence that samples in an iteration, with whatever its request wants besides.

A sequence's wishes are an object that lives as long as its row of the sequence table: made where plans arrive, handed
over with each step that samples for it, used by the compute thread alone, in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from services.worker.sampling.drawing import draw
from services.worker.sampling.logprobs import Scores, score

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from services.worker.sampling.drawing import SamplingColumns
    from services.worker.sampling.logit_rules import LogitRule
    from shared.messages import TokenLogprobs

__all__ = ["ChosenScores", "ChosenTokens", "Wishes", "choose"]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a sequence wants besides a draw."""

    rules: tuple[LogitRule, ...]
    num_logprobs: int | None
    """Log probabilities of the most likely tokens, so many; None: not even that of the token itself."""


class ChosenScores(NamedTuple):
    """Log probabilities of some of an iteration's tokens."""

    places: list[int]
    """Which of the S tokens, rising."""
    num_top: list[int]
    scores: Scores

    def messages(self) -> dict[int, TokenLogprobs]:
        """Return them by place."""
        return dict(zip(self.places, self.scores.messages(self.num_top), strict=True))


class ChosenTokens(NamedTuple):
    """Tokens of the S sequences that sample."""

    on_device: Tensor
    """[S] int64"""
    token_ids: list[int]
    """The same."""
    invalid: list[int]
    """Places of sequences that no token will do for, or whose logits are not finite: their token is 0."""
    scores: ChosenScores | None


def choose(logits: Tensor, columns: SamplingColumns, wishes: Sequence[tuple[int, Wishes]]) -> ChosenTokens:
    """Choose by ``logits`` [S, vocab_size], which are used up; ``wishes`` come with their places, rising."""
    logits = logits.float()
    places = [place for place, wish in wishes if wish.num_logprobs is not None]
    raw = logits[places] if places else None
    for place, wish in wishes:
        if wish.rules and logits[place].amax().isfinite():  # no mask may hide what makes a row invalid
            for rule in wish.rules:
                rule.apply(logits[place])
    on_device, valid = draw(logits, columns)
    token_ids = on_device.tolist()
    for place, wish in wishes:
        for rule in wish.rules:
            rule.note(token_ids[place])
    scores = None
    if raw is not None:
        num_top = [wish.num_logprobs for _, wish in wishes if wish.num_logprobs is not None]
        scores = ChosenScores(places, num_top, score(raw, on_device[places], max(num_top)))
    return ChosenTokens(on_device, token_ids, (~valid).nonzero().flatten().tolist(), scores)
