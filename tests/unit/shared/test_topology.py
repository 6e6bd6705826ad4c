from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.topology import Topology, split_layers

small = st.integers(1, 12)


@given(small, small)
def test_every_rank_has_its_place(num_stages: int, tp_size: int) -> None:
    topology = Topology(num_stages, tp_size)
    ranks = topology.ranks()
    assert [topology.world_rank(*rank) for rank in ranks] == list(range(topology.world_size))
    assert ranks == sorted(set(ranks))


@pytest.mark.parametrize("shape", [(0, 1), (1, 0), (-1, 1), (1025, 1), (1, 1025)])
def test_shapes_that_cannot_be(shape: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="must be between 1 and 1024"):
        Topology(*shape)


@pytest.mark.parametrize(
    ("rank", "said"), [((2, 0), "stages 0 to 1"), ((-1, 0), "stage -1"), ((0, 3), "has 0 to 2"), ((0, -1), "rank -1")]
)
def test_ranks_that_are_not_there(rank: tuple[int, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Topology(2, 3).world_rank(*rank)


@given(st.integers(1, 200), st.data())
def test_layers_are_shared_fairly(num_layers: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, num_layers))
    stages = split_layers(num_layers, num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True), "the last stage, which has the output head, has the smallest share"


def test_more_stages_than_layers() -> None:
    with pytest.raises(ConfigError, match="--stages 3 is the most"):
        split_layers(3, 4)
