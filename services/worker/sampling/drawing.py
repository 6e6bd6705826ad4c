"""The draw: one token for each row of logits, greedy or random, for all sampling rows of an iteration at once.

A token is a pure function of its row's logits, its request's parameters, its seed and its position: whatever else is in
the batch, and after a preemption or a restart, it comes out the same. Here are parameters and random numbers, in
``kernels.sample`` what is made of them. Knows nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

import kernels

if TYPE_CHECKING:
    from torch import Tensor

    _Column = np.ndarray[tuple[int], np.dtype[Any]]

__all__ = ["MIN_TEMPERATURE", "Sampled", "SamplingColumns", "draw", "uniforms"]

MIN_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: nothing but the largest logit would have a chance."""


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Parameters of S rows, as NumPy columns [S] on the host."""

    temperature: _Column
    """float32; 0 is greedy."""
    top_k: _Column
    """int32; keep so many of the most probable tokens. 0 or at least the vocabulary: off."""
    top_p: _Column
    """float32; keep the fewest most probable tokens whose probabilities sum to this. 1: off; at least one is kept."""
    min_p: _Column
    """float32; drop tokens less probable than this times the most probable one. 0: off; 1: greedy."""
    seed: _Column
    """int64 or uint64, all 64 bits used."""
    position: _Column
    """int64, place of the token that is sampled in its sequence."""

    def greedy(self) -> _Column:
        """Return for each row whether nothing but its largest logit has a chance, bool."""
        greedy: _Column = (self.temperature < MIN_TEMPERATURE) | (self.top_k == 1) | (self.min_p >= 1.0)
        return greedy


class Sampled(NamedTuple):
    """One token per row."""

    token_ids: Tensor
    """[S] int64; 0 where it is not valid."""
    valid: Tensor
    """[S] bool; false where the logits hold NaN or infinity, or all are minus infinity."""


def draw(logits: Tensor, columns: SamplingColumns) -> Sampled:
    """Return a token for each row of ``logits`` [S, vocab_size], on their device."""
    greedy = columns.greedy()
    parameters = (
        np.where(greedy, np.float32(1.0), columns.temperature),
        np.where(greedy, np.int32(1), columns.top_k),
        columns.top_p,
        columns.min_p,
        np.zeros(greedy.size) if greedy.all() else uniforms(columns.seed, columns.position),
    )
    with torch.inference_mode():
        on_device = (torch.from_numpy(column).to(logits.device) for column in parameters)
        return Sampled(*kernels.sample(logits.float(), *on_device))


def uniforms(seed: _Column, position: _Column) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return one number of [0, 1) per row, from counter-based randomness: SplitMix64 (Steele et al. 2014), twice."""
    stream = _splitmix(np.asarray(seed).astype(np.uint64))
    bits = _splitmix(stream + np.asarray(position).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    # 32 bits: few enough that number * sum never rounds up to the sum.
    return (bits >> np.uint64(32)).astype(np.float64) * 2.0**-32


def _splitmix(z: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
