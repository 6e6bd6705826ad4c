"""Scenarios 17, 22 and 24 at the place where they are decided: all extremes in one batch, and company of any size."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from services.worker.sampling.drawing import MIN_TEMPERATURE, SamplingColumns, draw
from services.worker.sampling.logit_rules import logit_rules
from services.worker.sampling.sampler import Wishes, choose
from shared.messages import SamplingParams
from tests.fakes.fake_worker_peers import sequence

VOCAB_SIZE = 50
EXTREMES = list(
    itertools.product(
        (0.0, 1e-45, 1e-10, 1e-4, 1e-2, 2.0, 100.0),
        (0, 1, VOCAB_SIZE, VOCAB_SIZE + 1),
        (1e-9, 0.5, 1.0),
        (0.0, 0.5, 1.0),
    )
)
"""(temperature, top_k, top_p, min_p); what is out of range is refused at the gateway and again at the scheduler."""


def columns(rows: list[tuple[float, int, float, float]], *, seed: int = 3) -> SamplingColumns:
    temperature, top_k, top_p, min_p = (np.array(values) for values in zip(*rows, strict=True))
    return SamplingColumns(
        temperature=temperature.astype(np.float32),
        top_k=top_k.astype(np.int32),
        top_p=top_p.astype(np.float32),
        min_p=min_p.astype(np.float32),
        seed=np.full(len(rows), seed, np.int64),
        position=np.arange(len(rows), dtype=np.int64),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_22_every_extreme_in_one_batch_beside_a_greedy_one(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    logits = (20 * torch.randn(len(EXTREMES) + 1, VOCAB_SIZE)).to(dtype)
    logits[0] = -100.0  # the neighbour: every id but one is biased away
    logits[0, 17] = 0.0
    sampled = draw(logits, columns([(0.0, 0, 1.0, 0.0), *EXTREMES]))
    assert sampled.valid.all()
    assert sampled.token_ids[0] == 17
    for (temperature, top_k, top_p, min_p), row, token_id in zip(
        EXTREMES, logits[1:], sampled.token_ids[1:].tolist(), strict=True
    ):
        assert 0 <= token_id < VOCAB_SIZE
        if temperature < MIN_TEMPERATURE or top_k == 1 or top_p < 1e-6 or min_p == 1.0:
            assert row[token_id] == row.max(), "one token is left, and it is the most probable"


def test_24_a_draw_is_the_same_in_company_of_any_size() -> None:
    torch.manual_seed(2)
    row = torch.randn(1, VOCAB_SIZE)
    alone = [
        draw(row, columns([(temperature, 0, 0.9, 0.0)], seed=seed)).token_ids.item()
        for seed in range(50)
        for temperature in (0.0, 1.0)
    ]
    for num_neighbours in (1, 7, 31):
        company = torch.randn(num_neighbours, VOCAB_SIZE)
        together = [
            draw(
                torch.cat([row, company]),
                columns([(temperature, 0, 0.9, 0.0), *EXTREMES[:: len(EXTREMES) // 31][:num_neighbours]], seed=seed),
            )
            .token_ids[0]
            .item()
            for seed in range(50)
            for temperature in (0.0, 1.0)
        ]
        assert together == alone


def test_17_log_probabilities_are_finite_whatever_was_barred() -> None:
    bias = tuple((token_id, -100.0) for token_id in range(2, VOCAB_SIZE))
    barred = sequence(0, [0], SamplingParams(temperature=1.0, top_k=1, logit_bias=bias))
    logits = torch.randn(2, VOCAB_SIZE)
    logits[:, 5] = -math.inf
    wish = Wishes(tuple(logit_rules(barred, VOCAB_SIZE, torch.device("cpu"))), 20)
    chosen = choose(logits, columns([(1.0, 1, 1.0, 0.0), (0.0, 0, 1.0, 0.0)]), [(0, wish), (1, Wishes((), 20))])
    assert chosen.token_ids[0] in {0, 1}
    assert chosen.scores is not None
    for told in chosen.scores.messages().values():
        assert math.isfinite(told.logprob)
        assert len(told.top) == 20
        assert all(math.isfinite(logprob) for _, logprob in told.top)
