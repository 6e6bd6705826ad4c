"""The operations on CPUs by torch's fused ones, in as few calls as they allow: for what our own library does not take.

Shapes, types and meaning are those of ``kernels.reference``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone uses
from torch import Tensor

__all__ = [
    "apply_rotary",
    "argmax",
    "gelu_tanh",
    "layer_norm",
    "most_probable",
    "paged_attention",
    "rms_norm",
    "sample",
    "silu_mul",
    "write_kv",
]

_GROUP_BYTES = 1 << 20
"""K (and as much V) that is gathered at a time: what stays in a core's cache, and what malloc has at hand."""

_WIDTHS = (256, 4096)
"""Candidates looked at before a row's whole vocabulary is sorted; the first are nearly always enough for top-p."""

_MAX_ROWS = 32
"""Rows drawn at a time, which bounds the memory: a vocabulary of 128 k takes 1 MiB a row and array."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``."""
    return F.rms_norm(x, weight.shape, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See ``reference.layer_norm``."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """See ``reference.apply_rotary``."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    for x in (q, k):
        first, second = x.chunk(2, dim=-1)
        rotated = torch.addcmul(first * cos, second, sin, value=-1.0)
        second.copy_(torch.addcmul(second * cos, first, sin))
        first.copy_(rotated)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See ``reference.silu_mul``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh(x: Tensor) -> Tensor:
    """See ``reference.gelu_tanh``."""
    return F.gelu(x, approximate="tanh")


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See ``reference.write_kv``."""
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k.to(k_cache.dtype))
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v.to(v_cache.dtype))


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
) -> Tensor:
    """See ``reference.paged_attention``.

    Requests with one token are computed together, those of similar length in one call; longer queries one by one.
    """
    out = torch.empty_like(q)
    starts, lengths = query_start.tolist(), context_lens.tolist()
    decodes: list[int] = []
    for request, context_len in enumerate(lengths):
        first, last = starts[request], starts[request + 1]
        if last - first == 1:
            decodes.append(request)
        elif last > first:
            out[first:last] = _prefill(
                q[first:last], k_cache, v_cache, block_tables[request], context_len=context_len, scale=scale
            )
    token_bytes = k_cache[0, 0].nbytes
    for group in _similar_lengths(decodes, lengths, _GROUP_BYTES // token_bytes):
        rows = [starts[request] for request in group]
        group_lengths = [lengths[request] for request in group]
        out[rows] = _decode(q[rows], k_cache, v_cache, block_tables[group], group_lengths, scale)
    return out


def _similar_lengths(requests: list[int], lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Group requests so that padding to the longest of a group wastes less than half, and its K fits ``max_tokens``."""
    groups: list[list[int]] = []
    for request in sorted(requests, key=lengths.__getitem__):
        group = groups[-1] if groups else []
        if group and lengths[request] <= min(2 * lengths[group[0]], max_tokens // (len(group) + 1)):
            group.append(request)
        else:
            groups.append([request])
    return groups


def _decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, lengths: list[int], scale: float
) -> Tensor:
    """Attention of one token per request: q [B, H, D] to [B, H, D]."""
    longest = max(lengths)
    keys, values = (_gather(cache, block_tables, longest).to(q.dtype) for cache in (k_cache, v_cache))
    mask = None
    if min(lengths) < longest:
        mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
        for request, length in enumerate(lengths):
            # The rest of a block may hold anything, NaN included, which no mask would stop.
            keys[request, length:] = 0.0
            values[request, length:] = 0.0
        mask = mask[:, None, None, :]
    # The query heads that share a key-value head, taken as rows of one query: several times quicker than enable_gqa.
    rows = q.view(q.shape[0], k_cache.shape[2], -1, q.shape[2])
    out = F.scaled_dot_product_attention(
        rows, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return out.flatten(1, 2)


def _prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, *, context_len: int, scale: float
) -> Tensor:
    """Attention of one request's chunk: q [n, H, D] to [n, H, D]."""
    num_tokens = q.shape[0]
    keys, values = (
        _gather(cache, block_table[None], context_len).to(q.dtype).transpose(1, 2) for cache in (k_cache, v_cache)
    )
    whole = num_tokens == context_len
    mask = None if whole else torch.ones(num_tokens, context_len, dtype=torch.bool).tril(context_len - num_tokens)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys, values, attn_mask=mask, is_causal=whole, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _gather(cache: Tensor, block_tables: Tensor, num_tokens: int) -> Tensor:
    """Return a copy of the first tokens of each request, [B, num_tokens, KH, D]."""
    num_blocks = -(-num_tokens // cache.shape[1])
    blocks = cache.index_select(0, block_tables[:, :num_blocks].flatten())
    return blocks.view(block_tables.shape[0], -1, *cache.shape[2:])[:, :num_tokens]


def argmax(x: Tensor) -> Tensor:
    """See ``reference.argmax``. NumPy's is ten times quicker than torch's, which is scalar."""
    return torch.from_numpy(x.numpy().argmax(axis=-1))


def most_probable(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """See ``reference.most_probable``."""
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


class _Draw(NamedTuple):
    """What rows are drawn by; columns are [S, 1]."""

    peaks: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    def take(self, rows: Tensor) -> _Draw:
        return _Draw(*(column[rows] for column in self))

    def weights(self, logits: Tensor) -> Tensor:
        """Return probabilities relative to the most probable token's, [S, n]."""
        return logits.sub(self.peaks).div_(self.temperature).exp_()

    def invert(self, weights: Tensor) -> Tensor:
        """Return where each row's random number falls in its weights, [S, 1]; never on a weight of zero."""
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        drawn = torch.searchsorted(cumulative, self.uniform * cumulative[:, -1:], right=True)
        # A row of NaN, which is reported as not valid, must not point outside either.
        return drawn.clamp_(max=weights.shape[-1] - 1)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``reference.sample``."""
    token_ids = argmax(logits)
    peaks = logits.gather(-1, token_ids.unsqueeze(-1))
    columns = (temperature, top_k, top_p, min_p, uniform)
    draw = _Draw(peaks, *(column.unsqueeze(-1) for column in columns))
    is_random, is_ranked = top_k != 1, ((top_k > 0) & (top_k < logits.shape[-1])) | (top_p < 1.0)
    for rows, draw_some in ((is_random & is_ranked, _draw_ranked), (is_random & ~is_ranked, _draw_of_all)):
        for some in torch.split(rows.nonzero().flatten(), _MAX_ROWS):
            if len(some):
                token_ids[some] = draw_some(logits[some], draw.take(some)).squeeze(-1)
    valid = peaks.squeeze(-1).isfinite()
    return token_ids.masked_fill_(~valid, 0), valid


def _draw_of_all(logits: Tensor, draw: _Draw) -> Tensor:
    """Draw from all of the vocabulary, min-p aside, without sorting it."""
    weights = draw.weights(logits)
    return draw.invert(weights.masked_fill_(weights < draw.min_p, 0.0))


def _draw_ranked(logits: Tensor, draw: _Draw) -> Tensor:
    """Draw from the most probable tokens: of the first few candidates where they decide it, else of all, sorted."""
    vocab_size = logits.shape[-1]
    sums = draw.weights(logits).sum(dim=-1, keepdim=True, dtype=torch.float64)
    token_ids = torch.zeros(logits.shape[0], 1, dtype=torch.int64)
    pending = torch.arange(logits.shape[0])
    for width in sorted({min(width, vocab_size) for width in (*_WIDTHS, vocab_size)}):
        drawn, decided = _draw_of_top(logits[pending], sums[pending], draw.take(pending), width)
        token_ids[pending] = drawn
        pending = pending[~decided]
        if not len(pending):
            break
    return token_ids


def _draw_of_top(logits: Tensor, sums: Tensor, draw: _Draw, width: int) -> tuple[Tensor, Tensor]:
    """Draw from the ``width`` most probable tokens; return the tokens, and for which rows those were enough."""
    vocab_size = logits.shape[-1]
    candidates, token_ids = most_probable(logits, width)
    weights = draw.weights(candidates)
    mass = weights.cumsum(dim=-1, dtype=torch.float64)
    top_k = torch.where(draw.top_k > 0, draw.top_k, vocab_size).clamp_(max=vocab_size).long()
    limited = top_k < vocab_size
    threshold = draw.top_p * torch.where(limited, mass.gather(-1, top_k.clamp(max=width) - 1), sums)
    keep = (torch.arange(width) < top_k) & (mass - weights < threshold) & (weights >= draw.min_p)
    keep[:, 0] = True
    decided = torch.where(limited, top_k <= width, (mass[:, -1:] >= threshold) | (weights[:, -1:] < draw.min_p))
    by_id = token_ids.sort(dim=-1)
    drawn = draw.invert(weights.masked_fill_(~keep, 0.0).gather(-1, by_id.indices))
    return by_id.values.gather(-1, drawn), decided.squeeze(-1) | (width == vocab_size)
