"""Every operation in plain torch: the truth that the fast ones are tested against, readable rather than quick.

Types: inputs may be float32, float16 or bfloat16; sums, norms, angles and softmax are computed in float32 and rounded
once, to the input's type. Equal logits rank by token id, the smaller one first.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "add_rms_norm",
    "apply_rotary",
    "argmax",
    "gelu_tanh",
    "layer_norm",
    "most_probable",
    "paged_attention",
    "rms_norm",
    "rotate_and_write_kv",
    "sample",
    "silu_mul",
    "write_kv",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last axis; x [..., n], weight [n] (Zhang and Sennrich 2019)."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm(update: Tensor, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add ``hidden`` to ``update`` in place, and return that normalised as by ``rms_norm``; both [..., n]."""
    return rms_norm(update.add_(hidden), weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return (x - mean) / std * weight + bias over the last axis; x [..., n] (Ba et al. 2016)."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.float() + bias.float()).to(x.dtype)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate q [T, H, D] and k [T, KH, D] in place by the angles of each token; cos and sin [T, D / 2] float32.

    Element i is paired with i + D / 2, as in Hugging Face's weights (Su et al. 2021).
    """
    for x in (q, k):
        first, second = x.float().chunk(2, dim=-1)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        x.copy_(torch.cat((first * c - second * s, second * c + first * s), dim=-1))


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up; gate_up [..., 2n] holds the gate first."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate)).to(gate_up.dtype) * up.to(gate_up.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU by its tanh approximation, which GPT-2 calls gelu_new (Hendrycks and Gimpel 2016)."""
    wide = x.float()
    inner = (2.0 / torch.pi) ** 0.5 * (wide + 0.044715 * wide.pow(3))
    return (0.5 * wide * (1.0 + torch.tanh(inner))).to(x.dtype)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store k and v [T, KH, D] at their slots of the caches [num_blocks, block_size, KH, D]; slot_mapping [T] int64."""
    blocks, offsets = slot_mapping // k_cache.shape[1], slot_mapping % k_cache.shape[1]
    k_cache[blocks, offsets] = k.to(k_cache.dtype)
    v_cache[blocks, offsets] = v.to(v_cache.dtype)


def rotate_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Rotate q [T, H, D] and k [T, KH, D] in place and store k and v; see ``apply_rotary`` and ``write_kv``."""
    apply_rotary(q, k, cos, sin)
    write_kv(k, v, k_cache, v_cache, slot_mapping)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
) -> Tensor:
    """Return causal attention of each request over its own blocks, [T, H, D] (ORCA §3.2; PagedAttention).

    q [T, H, D]; caches [num_blocks, block_size, KH, D], where H is a multiple of KH; query_start [B + 1] int32;
    context_lens [B] int32, the query's own tokens included; block_tables [B, max_blocks] int32. The last query token of
    a request sees its whole context, the one before it one token less, and so on.
    """
    out = torch.empty_like(q)
    starts = query_start.tolist()
    group = q.shape[1] // k_cache.shape[2]
    for request, context_len in enumerate(context_lens.tolist()):
        first, last = starts[request], starts[request + 1]
        keys = _context(k_cache, block_tables[request], context_len).repeat_interleave(group, dim=1)
        values = _context(v_cache, block_tables[request], context_len).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), keys) * scale
        ages = torch.arange(last - first, device=q.device).unsqueeze(1) + context_len - (last - first)
        hidden = torch.arange(context_len, device=q.device).unsqueeze(0) > ages
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


def _context(cache: Tensor, block_table: Tensor, context_len: int) -> Tensor:
    """Return one request's keys or values, [context_len, KH, D] float32."""
    return cache[block_table.long()].flatten(0, 1)[:context_len].float()


def argmax(x: Tensor) -> Tensor:
    """Return where the largest element of the last axis is, [...] int64; not-a-number counts as the largest."""
    return x.max(dim=-1).indices


def most_probable(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest logits in the order of their rank, and their ids int64; logits [S, vocab] to [S, count]."""
    top = logits.sort(dim=-1, descending=True, stable=True)
    return top.values[:, :count], top.indices[:, :count]


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a token for each row of logits [S, vocab] float32, ids [S] int64, and whether they are valid, [S] bool.

    The parameters are [S]: temperature float32, at least 1e-5; top_k int32, keep so many of the most probable tokens,
    0: all, 1: greedy; top_p float32 in [0, 1], keep the fewest most probable of those whose probabilities sum to this,
    at least one; min_p float32 in [0, 1], drop tokens less probable than this times the most probable one. What is left
    is drawn from in the order of token ids, by inverse transform of uniform, float64 in [0, 1 - 2^-32]. Sums are
    float64. A row is not valid, and its token 0, where it has NaN or infinity, or nothing but minus infinity.
    """
    vocab_size = logits.shape[-1]
    ranked, ids = most_probable(logits, vocab_size)
    peaks = ranked[:, 0]
    weights = ((ranked.double() - peaks.unsqueeze(-1)) / temperature.unsqueeze(-1)).exp()
    limits = torch.where(top_k > 0, top_k, vocab_size).unsqueeze(-1)
    weights.masked_fill_(torch.arange(vocab_size, device=logits.device) >= limits, 0.0)
    mass_before = weights.cumsum(-1) - weights
    kept = (mass_before < top_p.unsqueeze(-1) * weights.sum(-1, keepdim=True)) & (weights >= min_p.unsqueeze(-1))
    kept[:, 0] = True
    cumulative = torch.zeros_like(weights).scatter_(-1, ids, weights * kept).cumsum(-1)
    token_ids = torch.searchsorted(cumulative, uniform.unsqueeze(-1) * cumulative[:, -1:], right=True).squeeze(-1)
    valid = peaks.isfinite()
    return token_ids.masked_fill(~valid, 0), valid
