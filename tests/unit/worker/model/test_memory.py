from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.worker.batch import ForwardBatch, on_device
from services.worker.kv_cache import KvCache, bytes_per_block, num_blocks_within
from services.worker.model.parameters import Parameters
from services.worker.model.random_weights import RandomWeights
from services.worker.tensor_parallel import SingleRank
from shared.errors import ConfigError, ModelError
from shared.model.config import ModelConfig

_CPU = torch.device("cpu")


_CONFIG = replace(ModelConfig.from_shape("tiny-llama"), num_kv_heads=2, head_dim=8)


@pytest.mark.parametrize(("tp_size", "heads_of_a_rank"), [(1, 2), (2, 1), (4, 1)])
def test_kv_cache_weighs_what_it_says(tp_size: int, heads_of_a_rank: int) -> None:
    kv = KvCache.allocate(
        _CONFIG, num_layers=2, tp_size=tp_size, num_blocks=5, block_size=16, device=_CPU, dtype=torch.bfloat16
    )
    block = bytes_per_block(_CONFIG, num_layers=2, tp_size=tp_size, block_size=16, dtype=torch.bfloat16)
    assert [tensor.shape for layer in kv.layers for tensor in layer] == [(5, 16, heads_of_a_rank, 8)] * 4
    assert sum(tensor.nbytes for layer in kv.layers for tensor in layer) == 5 * block
    assert num_blocks_within(6 * block - 1, block) == 5


def test_too_little_or_too_much_kv_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise the budget"):
        num_blocks_within(99, 100)
    with pytest.raises(ConfigError, match="smaller K/V budget"):
        KvCache.allocate(
            _CONFIG, num_layers=1, tp_size=1, num_blocks=1 << 50, block_size=16, device=_CPU, dtype=torch.float32
        )


def test_a_batch_has_columns_of_its_own_types() -> None:
    batch = ForwardBatch.from_arrays(
        token_ids=np.array([5, 6, 7], dtype=np.int32),
        positions=[0, 1, 9],
        slot_mapping=[0, 1, 21],
        query_start=[0, 2, 3],
        context_lens=[2, 10],
        block_tables=np.array([[0, 3], [0, 4], [0, 5]]).T,
        sample_rows=[1, 2],
        device=_CPU,
    )
    assert batch.token_ids.tolist() == [5, 6, 7]
    assert batch.block_tables.tolist() == [[0, 0, 0], [3, 4, 5]]
    assert batch.block_tables.is_contiguous()
    assert (batch.num_tokens, batch.num_requests) == (3, 2)
    wide = (batch.token_ids, batch.positions, batch.slot_mapping, batch.sample_rows)
    assert {column.dtype for column in wide} == {torch.int64}
    assert {column.dtype for column in (batch.query_start, batch.context_lens, batch.block_tables)} == {torch.int32}


def test_arrays_keep_their_shapes_and_types_on_the_way_to_another_device() -> None:
    arrays = (np.zeros((3, 2), np.int32), np.zeros(5, np.int64), np.zeros(0, np.int64))
    columns = on_device(torch.device("meta"), *arrays)
    assert [(column.shape, column.dtype) for column in columns] == [
        ((3, 2), torch.int32),
        ((5,), torch.int64),
        ((0,), torch.int64),
    ]


def test_weights_that_do_not_fit_are_refused() -> None:
    parameters = Parameters(_CONFIG, RandomWeights(0, _CPU), SingleRank(), _CPU, torch.float32)
    with pytest.raises(ModelError, match="tiny-llama do not fit the memory of cpu"):
        parameters.matrix("embed_tokens.weight", (1, 1), range(1), padded_rows=1 << 55)
