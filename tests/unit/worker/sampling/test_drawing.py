from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.sampling.drawing import SamplingColumns, draw, most_probable, uniforms

_PROBABILITIES = torch.tensor([0.1, 0.4, 0.2, 0.3])


def _columns(num_rows: int, **values: Any) -> SamplingColumns:
    """Return columns for rows that differ in position only, unless said otherwise."""

    def column(name: str, default: Any, dtype: Any) -> np.ndarray[Any, Any]:
        return np.broadcast_to(np.asarray(values.get(name, default), dtype=dtype), num_rows).copy()

    return SamplingColumns(
        temperature=column("temperature", 1.0, np.float32),
        top_k=column("top_k", 0, np.int32),
        top_p=column("top_p", 1.0, np.float32),
        min_p=column("min_p", 0.0, np.float32),
        seed=column("seed", 11, np.int64),
        position=column("position", np.arange(num_rows), np.int64),
    )


def _frequencies(probabilities: Tensor, num_rows: int = 20_000, **values: Any) -> Tensor:
    """Return how often each token comes out at so many positions."""
    logits = probabilities.log().expand(num_rows, -1)
    sampled = draw(logits, _columns(num_rows, **values))
    assert sampled.valid.all()
    return torch.bincount(sampled.token_ids, minlength=len(probabilities)) / num_rows


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"seed": -1}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        ({"top_k": 2}, [0.0, 4 / 7, 0.0, 3 / 7]),
        ({"top_k": 99}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 0.75}, [0.0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 0.65}, [0.0, 4 / 7, 0.0, 3 / 7]),
        ({"top_k": 3, "top_p": 0.7}, [0.0, 4 / 7, 0.0, 3 / 7]),  # of what top-k left: 4/9 + 3/9 > 0.7
        ({"min_p": 0.6}, [0.0, 4 / 7, 0.0, 3 / 7]),
        ({"min_p": 0.3, "top_k": 2}, [0.0, 4 / 7, 0.0, 3 / 7]),
        ({"top_p": 1e-9}, [0.0, 1.0, 0.0, 0.0]),
        ({"top_p": 0.0}, [0.0, 1.0, 0.0, 0.0]),
        ({"min_p": 1.0}, [0.0, 1.0, 0.0, 0.0]),
        ({"top_k": 1}, [0.0, 1.0, 0.0, 0.0]),
        ({"temperature": 0.0}, [0.0, 1.0, 0.0, 0.0]),
        ({"temperature": 1e-6, "top_p": 0.5}, [0.0, 1.0, 0.0, 0.0]),
    ],
)
def test_frequencies_are_the_filtered_probabilities(values: dict[str, Any], expected: list[float]) -> None:
    frequencies = _frequencies(_PROBABILITIES, **values)
    wanted = torch.tensor(expected)
    assert torch.equal(frequencies == 0.0, wanted == 0.0)
    torch.testing.assert_close(frequencies, wanted, atol=0.015, rtol=0.0)


def test_each_row_has_its_own_parameters_and_company_changes_nothing() -> None:
    logits = torch.randn(40, 700, generator=torch.Generator().manual_seed(0)) * 3
    numbers = np.random.default_rng(0)
    columns = SamplingColumns(
        temperature=numbers.choice([0.0, 0.3, 1.0, 5.0], 40).astype(np.float32),
        top_k=numbers.choice([0, 1, 5, 256, 300, 700], 40).astype(np.int32),
        top_p=numbers.choice([1.0, 0.9, 0.999, 0.1], 40).astype(np.float32),
        min_p=numbers.choice([0.0, 0.02, 1.0], 40).astype(np.float32),
        seed=numbers.integers(-(1 << 63), 1 << 63, 40),
        position=numbers.integers(0, 4000, 40),
    )
    together = draw(logits, columns).token_ids
    for rows in (np.array([i]) for i in range(40)):
        assert draw(logits[rows], columns.take(rows)).token_ids == together[rows]
    backwards = np.arange(40)[::-1].copy()
    assert torch.equal(draw(logits[backwards], columns.take(backwards)).token_ids, together.flip(0))


def _slow(logits: np.ndarray[Any, Any], columns: SamplingColumns) -> int:
    """One row, by the definition."""
    if columns.temperature[0] < 1e-5:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")
    weights = np.exp((logits[order] - logits.max()).astype(np.float64) / float(columns.temperature[0]))
    top_k = int(columns.top_k[0]) or len(order)
    kept = weights[:top_k] / weights[:top_k].sum()
    before = np.cumsum(kept) - kept
    kept = kept[(before < float(columns.top_p[0])) & (kept >= columns.min_p[0] * kept[0])]
    target = uniforms(columns.seed, columns.position)[0] * kept.sum()
    ids = order[: len(kept)]
    if top_k == len(order) and columns.top_p[0] == 1.0:  # without a rank to respect, in the order of ids
        by_id = np.argsort(ids)
        ids, kept = ids[by_id], kept[by_id]
    return int(ids[np.searchsorted(np.cumsum(kept), target, side="right")])


@settings(deadline=None, derandomize=True)  # a number that falls within rounding of an edge would be no error
@given(
    st.integers(0, 1 << 30),
    st.sampled_from([3, 255, 256, 257, 900]),
    st.sampled_from([0.0, 0.2, 1.0, 4.0]),
    st.sampled_from([0, 2, 200, 256, 258]),
    st.sampled_from([1.0, 0.95, 0.5]),
    st.sampled_from([0.0, 0.1]),
)
def test_agrees_with_the_definition(
    seed: int, vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
    top_k = 0 if top_k >= vocab_size else top_k
    columns = _columns(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, position=seed % 99)
    assert int(draw(logits, columns).token_ids) == _slow(logits[0].numpy(), columns)


def test_equal_logits_rank_by_id() -> None:
    logits = torch.zeros(2000, 1000)
    kept = draw(logits, _columns(2000, top_k=3)).token_ids
    assert set(kept.tolist()) == {0, 1, 2}
    nucleus = draw(logits, _columns(2000, top_p=0.5)).token_ids
    assert int(nucleus.max()) == 499
    assert draw(logits[:3], _columns(3, temperature=0.0)).token_ids.tolist() == [0, 0, 0]


def test_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((500, 600), -torch.inf)
    logits[:, 17], logits[:, 301] = 0.0, -1.0
    for values in ({}, {"top_p": 0.999}, {"top_k": 400}, {"temperature": 100.0}):
        sampled = draw(logits, _columns(500, **values))
        assert sampled.valid.all()
        assert set(sampled.token_ids.tolist()) == {17, 301}


@pytest.mark.parametrize("values", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_is_reported_and_harms_no_other(values: dict[str, Any], bad: float) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    columns = _columns(4, **values)
    expected = draw(logits, columns).token_ids
    broken = logits.clone()
    broken[2] = bad
    if bad != -torch.inf:
        broken[2, 1:] = logits[2, 1:]
    sampled = draw(broken, columns)
    assert sampled.valid.tolist() == [True, True, False, True]
    assert torch.equal(sampled.token_ids[[0, 1, 3]], expected[[0, 1, 3]])
    assert 0 <= int(sampled.token_ids[2]) < 300


def test_half_precision_logits_and_no_rows() -> None:
    logits = torch.tensor([[0.0, 3.0]], dtype=torch.bfloat16)
    assert draw(logits, _columns(1, temperature=0.0)).token_ids.tolist() == [1]
    assert draw(torch.empty(0, 5), _columns(0)).token_ids.tolist() == []


def test_uniforms_are_uniform_independent_and_fixed() -> None:
    position = np.arange(100_000)
    numbers = uniforms(np.full(100_000, 5), position)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts = np.histogram(numbers, bins=50, range=(0.0, 1.0))[0]
    assert float(((counts - 2000.0) ** 2 / 2000.0).sum()) < 86.0  # chi-squared, 49 degrees of freedom, p = 0.001
    for other in (
        uniforms(np.full(100_000, 6), position),
        np.roll(numbers, 1),
        uniforms(position, np.zeros(100_000, dtype=np.int64)),
    ):
        assert abs(float(np.corrcoef(numbers, other)[0, 1])) < 0.015


def test_uniforms_stay_as_they_are() -> None:
    """They are part of what a seed means; the numbers come from the published algorithm in Python's own integers."""
    actual = uniforms(np.array([0, 1, -1]), np.array([0, 7, 1 << 40]))
    np.testing.assert_allclose(actual, [0.652448486, 0.246965202, 0.544004138], atol=1e-9)


@pytest.mark.parametrize("num_values", [2, 30, 100_000])
@pytest.mark.parametrize("count", [0, 1, 20, 256, 700])
def test_the_most_probable_rank_by_id_among_equals(num_values: int, count: int) -> None:
    logits = torch.randint(num_values, (9, 700), generator=torch.Generator().manual_seed(num_values)).float()
    values, token_ids = most_probable(logits, count)
    expected = np.argsort(-logits.numpy(), axis=-1, kind="stable")[:, :count]
    assert token_ids.tolist() == expected.tolist()
    assert torch.equal(values, logits.gather(-1, token_ids))
