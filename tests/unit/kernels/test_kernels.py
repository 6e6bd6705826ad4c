"""The public operations, which choose by device, agree with the readable reference over random shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels
from kernels import reference

_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}
_DTYPES = st.sampled_from(list(_TOLERANCE))


def _close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = _TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def _randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 70), _DTYPES)
def test_norms(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    x, weight, bias = (_randn(i, *shape, dtype=dtype) for i, shape in enumerate(((num_tokens, size), (size,), (size,))))
    _close(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    _close(kernels.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5))


def test_argmax_takes_the_first_of_equals_and_what_is_no_number() -> None:
    x = torch.tensor([[0.0, 2.0, 2.0], [1.0, torch.nan, 3.0], [-torch.inf, -torch.inf, -torch.inf]])
    assert kernels.argmax(x).tolist() == [1, 1, 0]
    random = _randn(0, 7, 1000)
    assert torch.equal(kernels.argmax(random), reference.argmax(random))


def test_rms_norm_of_heads_that_are_a_view() -> None:
    """Queries are a slice of the fused projection."""
    heads = _randn(0, 5, 96)[:, :64].view(5, 4, 16)
    weight = _randn(1, 16)
    _close(kernels.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 70), _DTYPES)
def test_activations(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    x = _randn(0, num_tokens, 2 * size, dtype=dtype)
    _close(kernels.silu_mul(x), reference.silu_mul(x))
    _close(kernels.gelu_tanh(x), reference.gelu_tanh(x))


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(1, 16), _DTYPES)
def test_rotary(num_tokens: int, num_kv_heads: int, group: int, half: int, dtype: torch.dtype) -> None:
    fused = _randn(0, num_tokens, (num_kv_heads * group + num_kv_heads) * 2 * half, dtype=dtype)
    angles = _randn(1, num_tokens, half) * 100

    def rotated(ops: object) -> Tensor:
        out = fused.clone()
        q, k = torch.split(out, [num_kv_heads * group * 2 * half, num_kv_heads * 2 * half], dim=1)
        q, k = (x.view(num_tokens, -1, 2 * half) for x in (q, k))
        ops.apply_rotary(q, k, angles.cos(), angles.sin())  # type: ignore[attr-defined]
        return out

    _close(rotated(kernels), rotated(reference))


def test_rotary_turns_pairs_and_keeps_their_length() -> None:
    q, k = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 2.0]]])
    quarter = torch.tensor([[torch.pi / 2]])
    kernels.apply_rotary(q, k, quarter.cos(), quarter.sin())
    torch.testing.assert_close(q, torch.tensor([[[0.0, 1.0]]]))
    torch.testing.assert_close(k, torch.tensor([[[-2.0, 0.0]]]))


@st.composite
def _requests(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    """Return (query length, context length) of some requests, and a block size."""
    requests = []
    for _ in range(draw(st.integers(1, 6))):
        query = draw(st.one_of(st.just(1), st.integers(1, 20)))
        requests.append((query, query + draw(st.one_of(st.just(0), st.integers(0, 60)))))
    return requests, draw(st.sampled_from([1, 4, 16]))


@settings(max_examples=60, deadline=None)
@given(_requests(), st.sampled_from([(1, 1, 2), (4, 4, 8), (6, 2, 8), (8, 1, 16), (9, 3, 64)]), _DTYPES)
def test_attention_and_write_kv(
    case: tuple[list[tuple[int, int]], int], heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    requests, block_size = case
    num_heads, num_kv_heads, dim = heads
    num_blocks = [-(-context // block_size) for _, context in requests]
    order = torch.randperm(sum(num_blocks) + 2, generator=torch.Generator().manual_seed(9)).tolist()
    tables = torch.zeros(len(requests), max(num_blocks), dtype=torch.int32)
    starts, slots = [0], []
    caches = [torch.full((len(order), block_size, num_kv_heads, dim), torch.nan, dtype=dtype) for _ in range(2)]
    for i, (query, context) in enumerate(requests):
        blocks = [order.pop() for _ in range(num_blocks[i])]
        tables[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        where = [blocks[p // block_size] * block_size + p % block_size for p in range(context)]
        for seed, cache in enumerate(caches):
            cache.flatten(0, 1)[where] = _randn(10 * i + seed, context, num_kv_heads, dim, dtype=dtype)
        slots += where[context - query :]
        starts.append(starts[-1] + query)
    q = _randn(100, starts[-1], num_heads, dim, dtype=dtype)
    k, v = (_randn(seed, starts[-1], num_kv_heads, dim, dtype=dtype) for seed in (101, 102))
    slot_mapping = torch.tensor(slots)

    expected = [cache.clone() for cache in caches]
    reference.write_kv(k, v, expected[0], expected[1], slot_mapping)
    kernels.write_kv(k, v, caches[0], caches[1], slot_mapping)
    for cache, wanted in zip(caches, expected, strict=True):
        torch.testing.assert_close(cache, wanted, atol=0.0, rtol=0.0, equal_nan=True)

    lengths = torch.tensor([context for _, context in requests], dtype=torch.int32)
    arguments = (q, caches[0], caches[1], torch.tensor(starts, dtype=torch.int32), lengths, tables, dim**-0.5)
    actual = kernels.paged_attention(*arguments)
    assert not actual.isnan().any(), "what was never written was read"
    _close(actual, reference.paged_attention(*arguments))


def test_reference_attention_is_softmax_of_scores() -> None:
    """The truth itself, on one head and three tokens, by hand."""
    q, k, v = _randn(0, 3, 1, 2), _randn(1, 3, 1, 2), _randn(2, 3, 1, 2)
    caches = (k.view(1, 3, 1, 2), v.view(1, 3, 1, 2))
    out = reference.paged_attention(
        q, *caches, torch.tensor([0, 3]), torch.tensor([3]), torch.zeros(1, 1, dtype=torch.int32), 0.5
    )
    for row in range(3):
        scores = [float(q[row, 0] @ k[seen, 0]) * 0.5 for seen in range(row + 1)]
        weights = torch.tensor(scores).softmax(0)
        expected = sum((weight * v[seen, 0] for seen, weight in enumerate(weights)), torch.zeros(2))
        torch.testing.assert_close(out[row, 0], expected)


@pytest.mark.parametrize("dtype", list(_TOLERANCE))
def test_types_stay(dtype: torch.dtype) -> None:
    x = _randn(0, 2, 8, dtype=dtype)
    weight = torch.ones(8, dtype=dtype)
    assert kernels.rms_norm(x, weight, 1e-5).dtype == dtype
    assert kernels.silu_mul(x).dtype == dtype
