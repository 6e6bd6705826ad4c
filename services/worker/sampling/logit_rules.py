"""What requests do to their logits before a token is drawn: bias, penalties, a least length.

A rule belongs to one sequence and keeps what it must know of its tokens; it is made anew, from all tokens so far, where
a sequence is recomputed. Rules run in the order of Hugging Face's processors and vLLM's: bias, repetition penalty,
frequency and presence penalties, then whatever bars tokens. Sequences without such wishes have no rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from shared.messages import NewSequence

__all__ = ["BARRED", "LogitBias", "LogitRule", "MinTokens", "Penalties", "logit_rules"]

BARRED = float("-inf")
"""Logit of a token that must not be drawn."""

_FIRST_CAPACITY = 64


class LogitRule(Protocol):
    """One wish of one sequence, used in the order of its tokens."""

    def apply(self, logits: Tensor) -> None:
        """Change the logits [vocab_size] float32 of the next token, in place; where no token will do, bar all."""

    def note(self, token_id: int) -> None:
        """Learn which token it became."""


def logit_rules(sequence: NewSequence, vocab_size: int, device: torch.device) -> list[LogitRule]:
    """Return what ``sequence`` asks for, its grammar aside, in the order of application."""
    sampling = sequence.sampling
    rules: list[LogitRule] = []
    if sampling.logit_bias:
        rules.append(LogitBias(sampling.logit_bias, vocab_size, device))
    if sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty:
        rules.append(Penalties(sequence, device))
    num_left = sampling.min_tokens - (len(sequence.token_ids) - sequence.num_prompt_tokens)
    if num_left > 0 and sequence.stop_token_ids:
        rules.append(MinTokens(num_left, sequence.stop_token_ids, vocab_size, device))
    return rules


class LogitBias:
    """Adds to the logits of some tokens, as OpenAI's ``logit_bias``; ids beyond the vocabulary have none."""

    def __init__(self, bias: Iterable[tuple[int, float]], vocab_size: int, device: torch.device) -> None:
        known = [(token_id, added) for token_id, added in bias if token_id < vocab_size]
        self._token_ids = torch.tensor([token_id for token_id, _ in known], dtype=torch.int64, device=device)
        self._added = torch.tensor([added for _, added in known], dtype=torch.float32, device=device)

    def apply(self, logits: Tensor) -> None:
        """Add."""
        logits.index_add_(0, self._token_ids, self._added)

    def note(self, token_id: int) -> None:
        """Nothing depends on it."""


class Penalties:
    """Makes tokens less likely that are there already.

    Repetition (Keskar et al. 2019, as in Hugging Face): of all tokens of prompt and output, positive logits are divided
    by it, negative ones multiplied. Then OpenAI's: ``frequency_penalty`` is taken off for each time that the output has
    a token, ``presence_penalty`` once if it has it at all. Costs as much as there are different tokens.
    """

    def __init__(self, sequence: NewSequence, device: torch.device) -> None:
        self._repetition = sequence.sampling.repetition_penalty
        self._presence = sequence.sampling.presence_penalty
        self._frequency = sequence.sampling.frequency_penalty
        tokens = np.frombuffer(sequence.token_ids, np.uint32).astype(np.int64)
        num_output = len(tokens) - sequence.num_prompt_tokens
        if self._repetition == 1.0:
            tokens = tokens[sequence.num_prompt_tokens :]
        token_ids, places = np.unique(tokens, return_inverse=True)
        counts = np.bincount(places[len(tokens) - num_output :], minlength=len(token_ids))
        self._places = {token_id: place for place, token_id in enumerate(token_ids.tolist())}
        capacity = max(_FIRST_CAPACITY, 2 * len(token_ids))
        self._token_ids = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._token_ids[: len(token_ids)] = torch.from_numpy(token_ids)
        self._counts = torch.zeros(capacity, dtype=torch.float32, device=device)
        """Times that the output has each of ``token_ids``."""
        self._counts[: len(token_ids)] = torch.from_numpy(counts)

    def apply(self, logits: Tensor) -> None:
        """Penalise."""
        known = len(self._places)
        token_ids, counts = self._token_ids[:known], self._counts[:known]
        penalised = logits[token_ids]
        if self._repetition != 1.0:
            penalised = torch.where(penalised > 0, penalised / self._repetition, penalised * self._repetition)
        if self._frequency:
            penalised -= self._frequency * counts
        if self._presence:
            penalised -= self._presence * (counts > 0)
        logits.index_copy_(0, token_ids, penalised)

    def note(self, token_id: int) -> None:
        """Count it."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._token_ids):
            self._token_ids = torch.cat((self._token_ids, torch.zeros_like(self._token_ids)))
            self._counts = torch.cat((self._counts, torch.zeros_like(self._counts)))
        self._token_ids[place] = token_id
        self._counts[place] += 1.0


class MinTokens:
    """Bars the tokens that end the output until ``num_left`` more are there."""

    def __init__(self, num_left: int, stop_token_ids: Iterable[int], vocab_size: int, device: torch.device) -> None:
        self._num_left = num_left
        known = sorted(token_id for token_id in stop_token_ids if token_id < vocab_size)
        self._stop_token_ids = torch.tensor(known, dtype=torch.int64, device=device)

    def apply(self, logits: Tensor) -> None:
        """Bar them."""
        if self._num_left > 0:
            logits.index_fill_(0, self._stop_token_ids, BARRED)

    def note(self, token_id: int) -> None:
        """Count it."""
        del token_id
        self._num_left -= 1
