from __future__ import annotations

import math

import torch

from services.worker.sampling.logprobs import FLOOR, score
from shared.messages import TokenLogprobs


def test_log_probabilities_are_those_of_the_softmax() -> None:
    logits = 4 * torch.randn(5, 300, generator=torch.Generator().manual_seed(3))
    token_ids = torch.tensor([0, 299, 17, 5, 5])
    scores = score(logits, token_ids, 20)
    expected = logits.log_softmax(dim=-1)
    torch.testing.assert_close(scores.logprobs, expected[range(5), token_ids])
    top = expected.topk(20, dim=-1)
    torch.testing.assert_close(scores.top_logprobs, top.values)
    assert torch.equal(scores.top_ids, top.indices)


def test_messages_have_as_many_of_the_most_likely_as_each_asked_for() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]]).log()
    one, none = score(logits, torch.tensor([1, 1]), 2).messages([1, 0])
    assert math.isclose(one.logprob, math.log(0.2), rel_tol=1e-6)
    assert [token_id for token_id, _ in one.top] == [2]
    assert math.isclose(one.top[0][1], math.log(0.7), rel_tol=1e-6)
    assert none == TokenLogprobs(none.logprob)


def test_equals_rank_by_id_and_none_is_more_than_there_are() -> None:
    scores = score(torch.zeros(1, 4), torch.tensor([3]), 20)
    assert scores.top_ids.tolist() == [[0, 1, 2, 3]]


def test_every_number_is_finite() -> None:
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[0.0, -inf, -20000.0], [nan, 0.0, 1.0], [-inf, -inf, -inf], [inf, 0.0, 1.0]])
    scores = score(logits, torch.tensor([1, 1, 1, 1]), 3)
    assert scores.logprobs.isfinite().all()
    assert scores.top_logprobs.isfinite().all()
    assert scores.logprobs[0] == FLOOR
    assert scores.top_logprobs[0].tolist() == [0.0, FLOOR, FLOOR]
