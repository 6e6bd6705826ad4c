"""Every head, inner unit and token id is somebody's, and heads stay with the keys they attend to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.worker.model.partition import (
    check_divisible,
    heads_of_rank,
    intermediate_of_rank,
    kv_heads_of_rank,
    vocab_of_rank,
)
from shared.errors import ConfigError
from shared.model.shapes import named_shape


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(9, 3, 2), (9, 3, 3), (8, 4, 4), (8, 2, 4), (6, 2, 4), (12, 12, 5), (4, 1, 4)]
)
def test_parts_cover_everything_once(heads: int, kv_heads: int, size: int) -> None:
    config = replace(named_shape("smollm2-135m"), num_heads=heads, num_kv_heads=kv_heads)
    ranks = range(size)
    assert [head for rank in ranks for head in heads_of_rank(config, rank, size)] == list(range(heads))
    assert {head for rank in ranks for head in kv_heads_of_rank(config, rank, size)} == set(range(kv_heads))
    for rank in ranks:
        keys = kv_heads_of_rank(config, rank, size)
        assert {head * kv_heads // heads for head in heads_of_rank(config, rank, size)} == set(keys)
        assert len(heads_of_rank(config, rank, size)) % len(keys) == 0
    for part, total in ((intermediate_of_rank, config.intermediate_size), (vocab_of_rank, config.vocab_size)):
        assert [unit for rank in ranks for unit in part(config, rank, size)] == list(range(total))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 4), (4, 2, 3), (4, 4, 5), (9, 3, 0)])
def test_sizes_that_cannot_share_are_refused_with_those_that_can(heads: int, kv_heads: int, size: int) -> None:
    config = replace(named_shape("smollm2-135m"), num_heads=heads, num_kv_heads=kv_heads)
    with pytest.raises(ConfigError, match="Sizes that work for smollm2-135m: 1, 2"):
        check_divisible(config, size)
