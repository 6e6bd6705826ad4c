from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from services.worker.sampling.drawing import SamplingColumns
from services.worker.sampling.logit_rules import logit_rules
from services.worker.sampling.sampler import Wishes, choose
from shared.messages import SamplingParams
from tests.fakes.fake_worker_peers import sequence

LOGITS = torch.tensor([0.1, 0.5, 0.4]).log().repeat(4, 1)


def greedy(num_rows: int) -> SamplingColumns:
    zeros = np.zeros(num_rows)
    return SamplingColumns(
        temperature=zeros.astype(np.float32),
        top_k=zeros.astype(np.int32),
        top_p=np.ones(num_rows, np.float32),
        min_p=zeros.astype(np.float32),
        seed=zeros.astype(np.uint64),
        position=zeros.astype(np.int64),
    )


def wishes(num_logprobs: int | None = None, stops: frozenset[int] = frozenset(), **sampling: Any) -> Wishes:
    new = replace(sequence(0, [0], SamplingParams(**sampling)), stop_token_ids=stops)
    return Wishes(tuple(logit_rules(new, 3, torch.device("cpu"))), num_logprobs)


def test_wishes_change_their_own_rows_alone_and_learn_what_was_chosen() -> None:
    asked = [(1, wishes(presence_penalty=1.0)), (3, wishes(min_tokens=1, stops=frozenset({1})))]
    outputs = [choose(LOGITS.clone(), greedy(4), asked).token_ids for _ in range(3)]
    assert outputs == [[1, 1, 1, 2], [1, 2, 1, 1], [1, 1, 1, 1]]


def test_log_probabilities_are_of_the_raw_logits() -> None:
    asked = [(0, wishes(1)), (2, wishes(2, logit_bias=((0, 50.0),))), (3, wishes(presence_penalty=1.0))]
    chosen = choose(LOGITS.clone(), greedy(4), asked)
    assert chosen.token_ids == [1, 1, 0, 1]
    assert chosen.scores is not None
    told = chosen.scores.messages()
    assert list(told) == [0, 2]
    assert math.isclose(told[0].logprob, math.log(0.5), rel_tol=1e-6)
    assert math.isclose(told[2].logprob, math.log(0.1), rel_tol=1e-6)
    assert [token_id for token_id, _ in told[0].top] == [1]
    assert [token_id for token_id, _ in told[2].top] == [1, 2]


def test_who_may_choose_nothing_is_named() -> None:
    class Nothing:
        def apply(self, logits: torch.Tensor) -> None:
            logits.fill_(-torch.inf)

        def note(self, token_id: int) -> None:
            assert token_id == 0

    chosen = choose(LOGITS.clone(), greedy(4), [(2, Wishes((Nothing(),), 0))])
    assert (chosen.token_ids, chosen.invalid) == ([1, 1, 0, 1], [2])
    assert chosen.scores is not None
    assert math.isfinite(chosen.scores.messages()[2].logprob)


def test_no_mask_hides_what_is_not_a_number() -> None:
    logits = LOGITS.clone()
    logits[1, 1] = torch.nan
    chosen = choose(logits, greedy(4), [(1, wishes(0, min_tokens=1, stops=frozenset({1})))])
    assert (chosen.token_ids, chosen.invalid) == ([1, 0, 1, 1], [1])


def test_nobody_who_asks_for_nothing_is_scored() -> None:
    assert choose(LOGITS.clone(), greedy(4), []).scores is None
