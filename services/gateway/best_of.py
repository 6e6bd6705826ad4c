"""Choosing the most likely of several outputs: nothing of a prompt is shown before all its candidates have ended.

The measure is the mean log probability of an output's tokens, by the raw logits, so that long ones have no handicap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shared.generation import Delta

__all__ = ["BestOf"]


class BestOf:
    """Keeps the deltas of all candidates and gives those of the ``n`` best of each ``best_of``."""

    def __init__(self, *, n: int, best_of: int, shows_logprobs: bool) -> None:
        """Without ``shows_logprobs``, log probabilities only serve to choose."""
        self._n = n
        self._best_of = best_of
        self._shows_logprobs = shows_logprobs
        self._deltas: dict[int, list[Delta]] = {}
        """By candidate: prompt times ``best_of`` plus sample."""
        self._num_ended: dict[int, int] = {}
        """Candidates that have ended, by prompt."""

    def add(self, delta: Delta) -> list[Delta]:
        """Take a delta of a candidate; return those of the choices of its prompt once that is decided."""
        self._deltas.setdefault(delta.choice, []).append(delta)
        if delta.finish is None:
            return []
        prompt = delta.choice // self._best_of
        self._num_ended[prompt] = self._num_ended.get(prompt, 0) + 1
        if self._num_ended[prompt] < self._best_of:
            return []
        first = prompt * self._best_of
        candidates = [self._deltas.pop(first + sample) for sample in range(self._best_of)]
        candidates.sort(key=_mean_logprob, reverse=True)
        return [
            self._shown(delta, prompt * self._n + rank)
            for rank, deltas in enumerate(candidates[: self._n])
            for delta in [*(delta for delta in deltas if delta.is_prompt), _joined(deltas)]
        ]

    def _shown(self, delta: Delta, choice: int) -> Delta:
        if self._shows_logprobs:
            return delta._replace(choice=choice)
        return delta._replace(choice=choice, logprobs=())


def _mean_logprob(deltas: Iterable[Delta]) -> float:
    logprobs = [token.logprob or 0.0 for delta in deltas if not delta.is_prompt for token in delta.logprobs]
    return sum(logprobs) / max(1, len(logprobs))


def _joined(deltas: Iterable[Delta]) -> Delta:
    output = [delta for delta in deltas if not delta.is_prompt]
    return output[-1]._replace(
        text="".join(delta.text for delta in output),
        token_ids=tuple(token_id for delta in output for token_id in delta.token_ids),
        logprobs=tuple(token for delta in output for token in delta.logprobs),
        tool_calls=tuple(call for delta in output for call in delta.tool_calls),
    )
