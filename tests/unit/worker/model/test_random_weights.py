from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.model.random_weights import RandomWeights
from shared.model.source import RandomModel

if TYPE_CHECKING:
    from collections.abc import Callable

_CPU = torch.device("cpu")


@settings(deadline=None)
@given(st.integers(0, 299), st.integers(1, 300), st.integers(0, 39), st.integers(1, 40), st.integers(0, 3))
def test_a_part_is_that_part_of_the_whole(row: int, num_rows: int, column: int, num_columns: int, seed: int) -> None:
    rows, columns = range(row, min(row + num_rows, 300)), range(column, min(column + num_columns, 40))
    weights = RandomWeights(seed, _CPU)
    whole = weights.read("layers.2.mlp.up_proj.weight", (300, 40), range(300), range(40))
    part = weights.read("layers.2.mlp.up_proj.weight", (300, 40), rows, columns)
    assert torch.equal(part, whole[rows.start : rows.stop, columns.start : columns.stop])


def test_values_are_spread_and_differ_by_name_and_seed() -> None:
    whole = RandomWeights(0, _CPU).read("a.weight", (2000, 500), range(2000), range(500))
    assert abs(float(whole.mean())) < 1e-4
    assert float(whole.std()) == pytest.approx(500**-0.5, rel=1e-2)
    assert float(whole.abs().max()) <= (3 / 500) ** 0.5
    assert abs(float(np.corrcoef(whole[:-1].flatten(), whole[1:].flatten())[0, 1])) < 0.01
    assert abs(float(np.corrcoef(whole[:, :-1].flatten(), whole[:, 1:].flatten())[0, 1])) < 0.01
    for seed, name in ((1, "a.weight"), (0, "b.weight")):
        other = RandomWeights(seed, _CPU).read(name, (2000, 500), range(2000), range(500))
        assert abs(float(np.corrcoef(whole.flatten(), other.flatten())[0, 1])) < 0.01


def test_norms_are_near_one_and_biases_near_zero() -> None:
    weights = RandomWeights(0, _CPU)
    norm = weights.read("layers.0.input_layernorm.weight", (999,), range(999))
    bias = weights.read("layers.0.input_layernorm.bias", (999,), range(999))
    assert float((norm - 1.0).abs().max()) < 0.04
    assert 0.01 < float(bias.abs().max()) < 0.04


def test_values_stay_as_they_are() -> None:
    """They are part of what a seed means; computed once with NumPy's unsigned integers."""
    values = RandomWeights(42, _CPU).read("embed_tokens.weight", (3, 4), range(3), range(4))
    expected = torch.tensor(
        [
            [0.757467, -0.023898, -0.260434, 0.154947],
            [-0.179188, 0.598287, -0.306687, 0.446946],
            [0.336315, -0.129756, -0.401634, 0.341405],
        ]
    )
    torch.testing.assert_close(values, expected, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-gpt2"])
def test_every_topology_computes_the_same(
    shape: str, sequences: dict[str, list[int]], make_mesh: Callable[..., Any]
) -> None:
    expected = make_mesh(RandomModel(shape, 1), 1, 1).run_mixed(sequences)
    assert all(float(logits.std()) > 0.2 for logits in expected.values())
    for num_stages, tp_size in ((3, 1), (2, 2), (1, 4)):
        for name, logits in make_mesh(RandomModel(shape, 1), num_stages, tp_size).run_mixed(sequences).items():
            torch.testing.assert_close(logits, expected[name], atol=1e-4, rtol=0.0)
    other = make_mesh(RandomModel(shape, 2), 1, 1).run_mixed(sequences)
    assert not torch.allclose(other["a"], expected["a"], atol=0.1)
