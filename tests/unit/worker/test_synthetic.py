from __future__ import annotations

import time

import torch

from services.worker.batch import ForwardBatch
from services.worker.kv_cache import KvCache
from services.worker.model.synthetic import HIDDEN_SIZE, SyntheticStage, synthetic_token
from shared.model.source import SyntheticModel

CPU = torch.device("cpu")


def make_batch(positions: list[int]) -> ForwardBatch:
    return ForwardBatch.from_arrays(
        token_ids=[0] * len(positions),
        positions=positions,
        slot_mapping=[0] * len(positions),
        query_start=[0, len(positions)],
        context_lens=[len(positions)],
        block_tables=[[0]],
        sample_rows=[len(positions) - 1],
        device=CPU,
    )


def test_tokens_depend_on_the_position_alone_and_are_printable() -> None:
    first, last = (SyntheticStage(SyntheticModel(), CPU) for _ in range(2))
    positions = [0, 7, 43, 44, 8000]
    batch, kv = make_batch(positions), KvCache((), 1, 16)
    hidden = last.forward(batch, first.forward(batch, None, kv), kv)
    assert hidden.shape == (5, HIDDEN_SIZE)
    logits = last.logits(hidden)
    assert logits.shape == (5, 260)
    assert logits.argmax(-1).tolist() == [synthetic_token(position + 1) for position in positions]
    assert all(32 <= synthetic_token(position) < 127 for position in range(200))


def test_step_takes_the_time_it_was_given() -> None:
    stage = SyntheticStage(SyntheticModel(step_ms=3, token_us=500), CPU)
    began = time.perf_counter()
    stage.forward(make_batch([0, 1, 2, 3]), None, KvCache((), 1, 16))
    assert time.perf_counter() - began >= 0.005
