"""The operations on CPUs by torch's fused ones, in as few calls as they allow: for what our own library does not take.

Shapes, types and meaning are those of ``kernels.reference``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone uses
from torch import Tensor

__all__ = ["apply_rotary", "argmax", "gelu_tanh", "layer_norm", "paged_attention", "rms_norm", "silu_mul", "write_kv"]

_GROUP_BYTES = 1 << 20
"""K (and as much V) that is gathered at a time: what stays in a core's cache, and what malloc has at hand."""


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
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)


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
    keys, values = (_gather(cache, block_tables, longest) for cache in (k_cache, v_cache))
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
    keys, values = (_gather(cache, block_table[None], context_len).transpose(1, 2) for cache in (k_cache, v_cache))
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
