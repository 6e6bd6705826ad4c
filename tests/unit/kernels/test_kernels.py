"""The public operations, which choose by device, agree with the readable reference over random shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels
from kernels import compiled, cpu, reference
from tests.paged import Heads, Paged, Request

if TYPE_CHECKING:
    from collections.abc import Callable

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
    sums = [x.clone(), x.clone()]
    normed = [ops.add_rms_norm(total, x, weight, 1e-5) for ops, total in zip((kernels, reference), sums, strict=True)]
    _close(*normed)
    assert torch.equal(*sums)
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
    sizes = [heads * 2 * half for heads in (num_kv_heads * group, num_kv_heads, num_kv_heads)]
    fused = _randn(0, num_tokens, sum(sizes), dtype=dtype)
    angles = _randn(1, num_tokens, half) * 100

    def rotated(rotate_and_write_kv: Callable[..., None]) -> Tensor:
        out = fused.clone()
        q, k, v = (x.view(num_tokens, -1, 2 * half) for x in torch.split(out, sizes, dim=1))
        k_cache, v_cache = torch.zeros(2, num_tokens, 1, num_kv_heads, 2 * half, dtype=dtype)
        rotate_and_write_kv(q, k, v, angles.cos(), angles.sin(), k_cache, v_cache, torch.arange(num_tokens))
        return out

    _close(rotated(kernels.rotate_and_write_kv), rotated(reference.rotate_and_write_kv))


def test_rotary_turns_pairs_and_keeps_their_length() -> None:
    q, k = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 2.0]]])
    quarter, (k_cache, v_cache) = torch.tensor([[torch.pi / 2]]), torch.zeros(2, 1, 1, 1, 2)
    kernels.rotate_and_write_kv(q, k, q.clone(), quarter.cos(), quarter.sin(), k_cache, v_cache, torch.tensor([0]))
    torch.testing.assert_close(q, torch.tensor([[[0.0, 1.0]]]))
    torch.testing.assert_close(k, torch.tensor([[[-2.0, 0.0]]]))


@pytest.fixture(params=["compiled", "torch"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the compiled library, and as where there is none."""
    if request.param == "torch":
        monkeypatch.setattr(compiled, "_library", lambda: None)
    return str(request.param)


_REQUESTS = st.lists(
    st.builds(Request, st.one_of(st.just(0), st.integers(0, 60)), st.one_of(st.just(1), st.integers(1, 20))),
    min_size=1,
    max_size=6,
)
_HEADS = [Heads(1, 1, 2), Heads(4, 4, 8), Heads(6, 2, 16), Heads(8, 1, 16), Heads(9, 3, 64)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=_REQUESTS, block_size=st.sampled_from([1, 4, 16]), heads=st.sampled_from(_HEADS), dtype=_DTYPES)
def test_attention_to_what_was_stored(
    version: str, requests: list[Request], block_size: int, heads: Heads, dtype: torch.dtype
) -> None:
    del version
    paged = Paged.of(requests, heads, dtype=dtype, block_size=block_size)
    tables, scale = (paged.query_start, paged.context_lens, paged.block_tables), heads.dim**-0.5
    caches, plain = paged.caches(dtype), paged.caches(dtype)
    kernels.write_kv(paged.k, paged.v, *caches, paged.slots)
    reference.write_kv(paged.k, paged.v, *plain, paged.slots)
    actual = kernels.paged_attention(paged.q, *caches, *tables, scale)
    assert not actual.isnan().any(), "what was never written was read"
    _close(actual, reference.paged_attention(paged.q, *plain, *tables, scale))


@pytest.mark.parametrize("cache_dtype", list(_TOLERANCE), ids=str)
@pytest.mark.parametrize("block_size", [16, 20])
def test_tables_with_gaps_and_caches_of_another_type(version: str, cache_dtype: torch.dtype, block_size: int) -> None:
    del version
    requests = [Request(30, 1), Request(0, 20), Request(7, 5)]
    paged = Paged.of(requests, Heads(4, 2, 16), dtype=torch.float32, block_size=block_size)
    tables = [with_gaps(table) for table in (paged.query_start, paged.context_lens, paged.block_tables)]
    angles, results = with_gaps(_randn(1, len(paged.k), 8)), []
    for operations in (kernels, reference):
        k, caches = paged.k.clone(), paged.caches(cache_dtype)
        operations.rotate_and_write_kv(k.clone(), k, paged.v, angles, angles, *caches, with_gaps(paged.slots))
        results.append(operations.paged_attention(paged.q, *caches, *tables, 0.3))
    torch.testing.assert_close(results[0], results[1], atol=0.02, rtol=0.02)


def with_gaps(x: Tensor) -> Tensor:
    """The same numbers, each apart from the next."""
    return torch.stack((x, torch.full_like(x, 9)), dim=-1)[..., 0]


@pytest.mark.parametrize("dtype", list(_TOLERANCE), ids=str)
@pytest.mark.parametrize("cache_dtype", list(_TOLERANCE), ids=str)
def test_torch_rounds_what_it_stores_to_the_type_of_the_cache(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    paged = Paged.of([Request(0, 9)], Heads(2, 2, 16), dtype=dtype)
    actual, expected = paged.caches(cache_dtype), paged.caches(cache_dtype)
    cpu.write_kv(paged.k, paged.v, *actual, paged.slots)
    reference.write_kv(paged.k, paged.v, *expected, paged.slots)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [16, 20])
def test_a_rotated_key_is_stored(version: str, dtype: torch.dtype, block_size: int) -> None:
    """Whatever order a cache is in, tokens that are rotated and stored are attended to."""
    del version
    heads = Heads(4, 2, 16)
    paged = Paged.of([Request(0, 9)], heads, dtype=dtype, block_size=block_size)
    angles = _randn(1, 9, 8)
    results = []
    for operations in (kernels, reference):
        q, k, caches = paged.q.clone(), paged.k.clone(), paged.caches(dtype)
        operations.rotate_and_write_kv(q, k, paged.v, angles.cos(), angles.sin(), *caches, paged.slots)
        results.append(
            operations.paged_attention(q, *caches, paged.query_start, paged.context_lens, paged.block_tables, 0.3)
        )
    _close(*results)


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
