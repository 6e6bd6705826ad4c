"""Single compiled operations against the readable reference, for each instruction set that this machine can run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.native.operations import Operations
from tests.paged import Heads, Paged, Request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from kernels.native.library import NativeKernels

KV_DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of attention; bfloat16 queries and probabilities have 8 bits."""
HEADS = [Heads(1, 1, 16), Heads(4, 2, 64), Heads(9, 3, 64), Heads(8, 1, 80), Heads(4, 4, 128), Heads(34, 2, 32)]


@pytest.fixture(scope="module")
def operations(kernels: NativeKernels) -> Operations:
    return Operations(kernels)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=30)
@given(num_tokens=st.integers(0, 9), size=st.integers(1, 130), exponent=st.integers(-6, 6))
def test_norms(operations: Operations, num_tokens: int, size: int, exponent: int) -> None:
    x, weight, hidden = randn(0, num_tokens, size) * 10.0**exponent, randn(1, size), randn(2, num_tokens, size)
    torch.testing.assert_close(operations.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    update, expected = x.clone(), x.clone()
    normed = operations.add_rms_norm(update, hidden, weight, 1e-5)
    torch.testing.assert_close(normed, reference.add_rms_norm(expected, hidden, weight, 1e-5))
    assert torch.equal(update, expected)


@settings(deadline=None, max_examples=30)
@given(num_tokens=st.integers(0, 9), size=st.integers(1, 130))
def test_silu_mul(operations: Operations, num_tokens: int, size: int) -> None:
    x = randn(0, num_tokens, 2 * size)
    torch.testing.assert_close(operations.silu_mul(x), reference.silu_mul(x))


def test_silu_mul_of_extremes(operations: Operations) -> None:
    gate = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 20.0, -20.0, 90.0, -90.0, 1e30, -1e30] * 2)
    x = torch.cat((gate, torch.ones(20)))[None]
    torch.testing.assert_close(operations.silu_mul(x), reference.silu_mul(x), atol=1e-7, rtol=1e-5)


@settings(deadline=None, max_examples=40)
@given(
    num_tokens=st.integers(1, 40),
    heads=st.sampled_from(HEADS),
    block_size=st.sampled_from([16, 32, 128]),
    dtype=st.sampled_from(KV_DTYPES),
)
def test_rotation_and_the_store(
    operations: Operations, num_tokens: int, heads: Heads, block_size: int, dtype: torch.dtype
) -> None:
    paged = Paged.of([Request(0, num_tokens)], heads, dtype=torch.float32, block_size=block_size)
    angles = randn(5, num_tokens, heads.dim // 2) * 100
    fused = torch.cat([part.flatten(1) for part in (paged.q, paged.k, paged.v)], dim=1)
    wanted_q, wanted_k, wanted = paged.q.clone(), paged.k.clone(), paged.caches(dtype)
    reference.rotate_and_write_kv(wanted_q, wanted_k, paged.v, angles.cos(), angles.sin(), *wanted, paged.slots)
    # As it comes out of one product for all three: rows lie apart.
    sizes = [heads.num * heads.dim, heads.num_kv * heads.dim, heads.num_kv * heads.dim]
    q, k, v = (part.view(num_tokens, -1, heads.dim) for part in torch.split(fused, sizes, dim=1))
    k_cache, v_cache = paged.caches(dtype)
    operations.rotate_and_write_kv(q, k, v, angles.cos(), angles.sin(), k_cache, v_cache, paged.slots)
    torch.testing.assert_close(q, wanted_q)
    torch.testing.assert_close(k, wanted_k)
    rtol = 2.0**-7 if dtype == torch.bfloat16 else 1e-5  # what lies near the middle may be rounded either way
    torch.testing.assert_close(in_plain_order(k_cache, "k"), wanted[0], equal_nan=True, atol=1e-5, rtol=rtol)
    assert same(in_plain_order(v_cache, "v"), wanted[1])

    again = paged.caches(dtype)
    operations.write_kv(k, v, *again, paged.slots)
    assert same(again[0], k_cache)
    assert same(again[1], v_cache)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether all elements are equal, or no numbers in both."""
    return torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0))


def in_plain_order(cache: Tensor, which: str) -> Tensor:
    """Return a cache that the kernels wrote, [num_blocks, block_size, KH, D], in the order that its shape tells."""
    num_blocks, block_size, num_kv_heads, dim = cache.shape
    if cache.dtype == torch.float32:
        units = cache.view(-1, num_kv_heads, dim, 16).mT if which == "k" else cache.view(-1, num_kv_heads, 16, dim)
    elif which == "k":
        units = cache.view(-1, num_kv_heads, dim // 2, 16, 2).transpose(2, 3).flatten(3)
    else:
        units = cache.view(-1, num_kv_heads, 8, dim, 2).transpose(3, 4).flatten(2, 3)
    return units.transpose(1, 2).reshape(num_blocks, block_size, num_kv_heads, dim)


def attend(operations: Operations, paged: Paged, dtype: torch.dtype) -> Tensor:
    k_cache, v_cache = paged.caches(dtype)
    operations.write_kv(paged.k, paged.v, k_cache, v_cache, paged.slots)
    return operations.paged_attention(
        paged.q, k_cache, v_cache, paged.query_start, paged.context_lens, paged.block_tables, 0.2
    )


def expected_attention(paged: Paged, dtype: torch.dtype) -> Tensor:
    k_cache, v_cache = (cache.zero_() for cache in paged.caches(torch.float32))
    reference.write_kv(paged.k.to(dtype).float(), paged.v.to(dtype).float(), k_cache, v_cache, paged.slots)
    return reference.paged_attention(
        paged.q, k_cache, v_cache, paged.query_start, paged.context_lens, paged.block_tables, 0.2
    )


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("heads", [*HEADS, Heads(2, 1, 256)], ids=str)
@pytest.mark.parametrize(
    "requests",
    [
        [(0, 1)],
        [(15, 1), (16, 1), (17, 1)],
        [(0, 50)],
        [(31, 18), (700, 1), (0, 1), (255, 2), (256, 1)],
        [(500, 13), (1, 1), (240, 40)],
    ],
    ids=str,
)
def test_attention(operations: Operations, requests: list[tuple[int, int]], heads: Heads, dtype: torch.dtype) -> None:
    paged = Paged.of([Request(*request) for request in requests], heads, dtype=torch.float32)
    result = attend(operations, paged, dtype)
    torch.testing.assert_close(result, expected_attention(paged, dtype), atol=TOLERANCE[dtype], rtol=0.0)


@settings(deadline=None, max_examples=40)
@given(
    requests=st.lists(st.builds(Request, st.integers(0, 300), st.integers(1, 60)), min_size=1, max_size=8),
    group=st.integers(1, 6),
    num_kv_heads=st.integers(1, 3),
    dim=st.sampled_from([16, 32, 48, 64, 80]),
    block_size=st.sampled_from([16, 32, 128]),
    dtype=st.sampled_from(KV_DTYPES),
)
def test_attention_of_random_shapes(
    operations: Operations,
    requests: list[Request],
    group: int,
    num_kv_heads: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    heads = Heads(group * num_kv_heads, num_kv_heads, dim)
    paged = Paged.of(requests, heads, dtype=torch.float32, block_size=block_size)
    result = attend(operations, paged, dtype)
    torch.testing.assert_close(result, expected_attention(paged, dtype), atol=TOLERANCE[dtype], rtol=0.0)


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
def test_a_token_does_not_depend_on_its_neighbours_nor_on_threads(
    operations: Operations, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """One long request with many short ones: each gets what it gets alone, to the bit."""
    requests = [Request(900, 100), *(Request(length, 1) for length in range(20)), Request(3, 30)]
    paged = Paged.of(requests, Heads(6, 2, 32), dtype=torch.float32)
    k_cache, v_cache = paged.caches(dtype)
    operations.write_kv(paged.k, paged.v, k_cache, v_cache, paged.slots)
    together = attend(operations, paged, dtype)
    request.getfixturevalue("two_threads")
    assert torch.equal(attend(operations, paged, dtype), together)
    for place, (first, last) in enumerate(paged.query_start.unfold(0, 2, 1).tolist()):
        starts = torch.tensor([0, last - first], dtype=torch.int32)
        one = slice(place, place + 1)
        alone = operations.paged_attention(
            paged.q[first:last], k_cache, v_cache, starts, paged.context_lens[one], paged.block_tables[one], 0.2
        )
        assert torch.equal(alone, together[first:last])


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
def test_scores_far_apart(operations: Operations, dtype: torch.dtype) -> None:
    """Softmax in pieces must not overflow where one key outshines all others, early or late."""
    for bright in (2, 300, 599):
        paged = Paged.of([Request(600, 3)], Heads(2, 1, 16), dtype=torch.float32)
        paged.k[bright] = 40.0 * paged.q[0].sign().mean(0)
        result = attend(operations, paged, dtype)
        assert result.isfinite().all()
        torch.testing.assert_close(result, expected_attention(paged, dtype), atol=5 * TOLERANCE[dtype], rtol=0.0)
