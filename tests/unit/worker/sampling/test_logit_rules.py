"""Rules against Hugging Face's processors, and against OpenAI's formulas written down."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from services.worker.sampling.logit_rules import logit_rules
from shared.messages import SamplingParams
from tests.fakes.fake_worker_peers import sequence

if TYPE_CHECKING:
    from torch import Tensor

    from services.worker.sampling.logit_rules import LogitRule

VOCAB_SIZE = 20
CPU = torch.device("cpu")
STOPS = frozenset({3, 7, VOCAB_SIZE + 5})

tokens_lists = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30)


def rules_of(prompt: list[int], output: list[int], **wishes: Any) -> list[LogitRule]:
    whole = replace(sequence(0, prompt + output, SamplingParams(**wishes)), stop_token_ids=STOPS)
    return logit_rules(replace(whole, num_prompt_tokens=len(prompt)), VOCAB_SIZE, CPU)


def applied(rules: list[LogitRule], logits: Tensor) -> Tensor:
    changed = logits.clone()
    for rule in rules:
        rule.apply(changed)
    return changed


def some_logits(seed: int) -> Tensor:
    return 3 * torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def hf(prompt: list[int], output: list[int], logits: Tensor, **wishes: Any) -> Tensor:
    processors = LogitsProcessorList()
    if wishes.get("logit_bias"):
        processors.append(SequenceBiasLogitsProcessor([[[token_id], bias] for token_id, bias in wishes["logit_bias"]]))
    if wishes.get("repetition_penalty", 1.0) != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(wishes["repetition_penalty"]))
    if wishes.get("min_tokens"):
        ends = [token_id for token_id in STOPS if token_id < VOCAB_SIZE]
        processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), wishes["min_tokens"], torch.tensor(ends)))
    scores = processors(torch.tensor([prompt + output]), logits[None].clone())  # type: ignore[arg-type]
    return torch.as_tensor(scores)[0]


@given(
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30),
    output=tokens_lists,
    repetition=st.sampled_from([1.0, 0.5, 1.3, 2.0]),
    bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100, width=32), max_size=5),
    min_tokens=st.integers(0, 40),
    seed=st.integers(0, 1000),
)
def test_as_hugging_face_has_it(
    prompt: list[int], output: list[int], repetition: float, bias: dict[int, float], min_tokens: int, seed: int
) -> None:
    wishes: dict[str, Any] = {
        "repetition_penalty": repetition,
        "logit_bias": tuple(bias.items()),
        "min_tokens": min_tokens,
    }
    expected = hf(prompt, output, some_logits(seed), **wishes)
    torch.testing.assert_close(applied(rules_of(prompt, output, **wishes), some_logits(seed)), expected)


@given(
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30),
    output=tokens_lists,
    presence=st.sampled_from([0.0, 0.7, -2.0]),
    frequency=st.sampled_from([0.0, 0.4, -1.0]),
    repetition=st.sampled_from([1.0, 1.5]),
)
def test_as_openai_has_it(
    prompt: list[int], output: list[int], presence: float, frequency: float, repetition: float
) -> None:
    wishes = {"presence_penalty": presence, "frequency_penalty": frequency, "repetition_penalty": repetition}
    expected = hf(prompt, output, some_logits(1), repetition_penalty=repetition)
    for token_id, count in Counter(output).items():
        expected[token_id] -= count * frequency + (count > 0) * presence
    torch.testing.assert_close(applied(rules_of(prompt, output, **wishes), some_logits(1)), expected)


@given(
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=5), output=tokens_lists, cut=st.integers(0, 30)
)
def test_a_recomputed_sequence_has_the_rules_of_one_that_went_on(
    prompt: list[int], output: list[int], cut: int
) -> None:
    wishes = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1, "min_tokens": 12}
    went_on = rules_of(prompt, output[:cut], **wishes)
    for token_id in output[cut:]:
        for rule in went_on:
            rule.note(token_id)
    anew = rules_of(prompt, output, **wishes)
    assert torch.equal(applied(went_on, some_logits(2)), applied(anew, some_logits(2)))


def test_many_different_tokens_outgrow_the_first_arrays() -> None:
    vocab_size = 300
    new = sequence(0, [0], SamplingParams(frequency_penalty=1.0))
    (rule,) = logit_rules(new, vocab_size, CPU)
    for token_id in [*range(200), *range(100)]:
        rule.note(token_id)
    logits = torch.zeros(vocab_size)
    rule.apply(logits)
    assert logits.tolist() == [-2.0] * 100 + [-1.0] * 100 + [0.0] * 100


def test_ids_beyond_the_vocabulary_are_no_tokens() -> None:
    wishes = {"logit_bias": ((VOCAB_SIZE, 5.0), (1, 2.0)), "min_tokens": 1}
    changed = applied(rules_of([1], [], **wishes), torch.zeros(VOCAB_SIZE))
    assert changed[[1, 3, 7]].tolist() == [2.0, -torch.inf, -torch.inf]
    assert changed.isfinite().sum() == VOCAB_SIZE - 2


@pytest.mark.parametrize(
    "wishes", [{}, {"temperature": 0.0, "top_k": 3}, {"min_tokens": 2, "num_logprobs": 3}], ids=["none", "draw", "done"]
)
def test_who_wishes_nothing_has_no_rules(wishes: dict[str, Any]) -> None:
    assert rules_of([1, 2], [3, 4], **wishes) == []
