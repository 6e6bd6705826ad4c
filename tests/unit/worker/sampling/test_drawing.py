from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.worker.sampling.drawing import SamplingColumns, draw, uniforms

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

    def alone(row: int) -> int:
        own = SamplingColumns(*(getattr(columns, field.name)[row : row + 1] for field in fields(columns)))
        return int(draw(logits[row : row + 1], own).token_ids)

    assert [alone(row) for row in range(40)] == together.tolist()


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
