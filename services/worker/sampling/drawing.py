"""The draw: one token for each row of logits, greedy or random, for all sampling rows of an iteration at once.

A token is a pure function of its row's logits, its request's parameters, its seed and its position: whatever else is in
the batch, and after a preemption or a restart, it comes out the same. Filters apply in the order top-k, top-p (of what
top-k left), min-p, all after temperature; equal logits rank by token id. Knows nothing of requests.
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

__all__ = ["MIN_TEMPERATURE", "Sampled", "SamplingColumns", "draw", "most_probable", "uniforms"]

MIN_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: nothing but the largest logit would have a chance."""

_WIDTHS = (256, 4096)
"""Candidates looked at before a row's whole vocabulary is sorted; the first are nearly always enough for top-p."""

_MAX_ROWS = 32
"""Rows drawn at a time, which bounds the memory: a vocabulary of 128 k takes 1 MiB a row and array."""


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

    def take(self, rows: _Column) -> SamplingColumns:
        """Return the parameters of some rows."""
        return SamplingColumns(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seed[rows],
            self.position[rows],
        )


class Sampled(NamedTuple):
    """One token per row."""

    token_ids: Tensor
    """[S] int64"""
    valid: Tensor
    """[S] bool; false where the logits hold NaN or infinity, or all are minus infinity, and the token means nothing."""


def draw(logits: Tensor, columns: SamplingColumns) -> Sampled:
    """Return a token for each row of ``logits`` [S, vocab_size], on their device."""
    with torch.inference_mode():
        logits = logits.float()
        token_ids = kernels.argmax(logits)
        peaks = logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
        greedy = columns.greedy()
        limited = (columns.top_k > 0) & (columns.top_k < logits.shape[-1])
        ordered = limited | (columns.top_p < 1.0)
        for rows, draw_some in (
            (np.flatnonzero(~greedy & ordered), _draw_ordered),
            (np.flatnonzero(~greedy & ~ordered), _draw_unordered),
        ):
            for start in range(0, rows.size, _MAX_ROWS):
                some = rows[start : start + _MAX_ROWS]
                index = torch.from_numpy(some).to(logits.device)
                token_ids[index] = draw_some(logits[index], peaks[index], columns.take(some))
        return Sampled(token_ids, torch.isfinite(peaks))


def uniforms(seed: _Column, position: _Column) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return one number of [0, 1) per row, from counter-based randomness: SplitMix64 (Steele et al. 2014), twice."""
    stream = _splitmix(np.asarray(seed).astype(np.uint64))
    bits = _splitmix(stream + np.asarray(position).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    # 32 bits: few enough that number * sum never rounds up to the sum.
    return (bits >> np.uint64(32)).astype(np.float64) * 2.0**-32


def most_probable(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest logits in falling order and their ids, [S, count]; the smaller id first among equals."""
    num_rows, vocab_size = logits.shape
    if count == 0:
        return logits.new_empty((num_rows, 0)), logits.new_empty((num_rows, 0), dtype=torch.int64)
    if count == vocab_size:
        top = logits.sort(dim=-1, descending=True, stable=True)
        return top.values, top.indices
    values, token_ids = logits.topk(count + 1, dim=-1)
    # Which of several equals are taken is up to torch: where the last one taken has an equal that is not, sort all.
    ambiguous = values[:, count] == values[:, count - 1]
    values, token_ids = values[:, :count], token_ids[:, :count]
    by_id = token_ids.sort(dim=-1)
    in_order = values.gather(-1, by_id.indices).sort(dim=-1, descending=True, stable=True)
    values, token_ids = in_order.values, by_id.values.gather(-1, in_order.indices)
    for row in ambiguous.nonzero().flatten().tolist():
        top = logits[row].sort(descending=True, stable=True)
        values[row], token_ids[row] = top.values[:count], top.indices[:count]
    return values, token_ids


def _splitmix(z: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _draw_unordered(logits: Tensor, peaks: Tensor, columns: SamplingColumns) -> Tensor:
    """Draw from all of the vocabulary, min-p aside, without sorting it."""
    weights = _weights(logits, peaks, columns)
    if columns.min_p.any():
        weights.masked_fill_(weights < _on(logits, columns.min_p), 0.0)
    return _invert(weights.cumsum(dim=-1, dtype=torch.float64), columns)


def _draw_ordered(logits: Tensor, peaks: Tensor, columns: SamplingColumns) -> Tensor:
    """Draw from the most probable tokens: of the first few candidates where they decide it, else of all, sorted."""
    vocab_size = logits.shape[-1]
    sums = _weights(logits, peaks, columns).sum(dim=-1, keepdim=True, dtype=torch.float64)
    token_ids = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    pending = np.arange(logits.shape[0])
    for width in sorted({min(width, vocab_size) for width in (*_WIDTHS, vocab_size)}):
        index = torch.from_numpy(pending).to(logits.device)
        drawn, decided = _draw_of_top(logits[index], peaks[index], sums[index], columns.take(pending), width)
        token_ids[index] = drawn
        pending = pending[~decided.cpu().numpy()]
        if not pending.size:
            break
    return token_ids


def _draw_of_top(
    logits: Tensor, peaks: Tensor, sums: Tensor, columns: SamplingColumns, width: int
) -> tuple[Tensor, Tensor]:
    """Draw from the ``width`` most probable tokens; return the tokens, and for which rows those were enough."""
    vocab_size = logits.shape[-1]
    candidates, token_ids = most_probable(logits, width)
    weights = _weights(candidates, peaks, columns)
    mass = weights.cumsum(dim=-1, dtype=torch.float64)
    top_k = _on(logits, np.where(columns.top_k > 0, columns.top_k, vocab_size).astype(np.int64)).clamp_(max=vocab_size)
    top_p, min_p = _on(logits, columns.top_p), _on(logits, columns.min_p)

    limited = top_k < vocab_size
    threshold = top_p * torch.where(limited, mass.gather(-1, top_k.clamp(max=width) - 1), sums)
    rank = torch.arange(width, device=logits.device)
    keep = (rank < top_k) & (mass - weights < threshold) & (weights >= min_p)
    keep[:, 0] = True
    decided = torch.where(limited, top_k <= width, (mass[:, -1:] >= threshold) | (weights[:, -1:] < min_p))
    drawn = _invert(weights.masked_fill_(~keep, 0.0).cumsum(dim=-1, dtype=torch.float64), columns)
    return token_ids.gather(-1, drawn.unsqueeze(-1)).squeeze(-1), decided.squeeze(-1) | (width == vocab_size)


def _weights(logits: Tensor, peaks: Tensor, columns: SamplingColumns) -> Tensor:
    """Return probabilities relative to the most probable token's, [S, n]."""
    return logits.sub(peaks.unsqueeze(-1)).div_(_on(logits, columns.temperature)).exp_()


def _invert(cumulative: Tensor, columns: SamplingColumns) -> Tensor:
    """Return where each row's random number falls in its cumulative weights, [S]; never on a weight of zero."""
    targets = _on(cumulative, uniforms(columns.seed, columns.position)) * cumulative[:, -1:]
    # A row of NaN, which is reported as not valid, must not point outside either.
    return torch.searchsorted(cumulative, targets, right=True).squeeze(-1).clamp_(max=cumulative.shape[-1] - 1)


def _on(like: Tensor, column: _Column) -> Tensor:
    """Return a column as [S, 1] on the device of ``like``."""
    return torch.from_numpy(column).to(like.device).unsqueeze(-1)
