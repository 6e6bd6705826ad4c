from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.admission import (
    MAX_CHOICES,
    check_options,
    check_text,
    check_vocabulary,
    count_candidates,
    parse_request_id,
)
from services.gateway.jobs import GenerateJob, JobTerms, Prompt, build_jobs, sample_seed
from shared.errors import InvalidRequestError
from shared.generation import GenerateOptions
from shared.ids import RequestId
from shared.messages import EngineInfo, token_ids
from shared.sampling import sampling_fault

ENGINE = EngineInfo("m", 64, 300, 48, 16, 1, 1, "float32")
EOS = frozenset({256})
UNKNOWN = 300


def jobs(
    prompts: list[list[int]], options: GenerateOptions, default: int | None = 16, *, echo: bool = False, **engine: Any
) -> list[GenerateJob]:
    info = dataclasses.replace(ENGINE, **engine)
    count_candidates(options, len(prompts))
    check_options(options, info, echo=echo)
    for prompt in prompts:
        check_vocabulary("prompt", prompt, info)
    terms = JobTerms(RequestId("r"), info, EOS | {UNKNOWN}, default, received_ns=5, echo=echo)
    return build_jobs([Prompt(token_ids(prompt)) for prompt in prompts], options, terms)


def job(prompt: list[int], options: GenerateOptions, default: int | None = 16, **terms: Any) -> GenerateJob:
    (admitted,) = jobs([prompt], options, default, **terms)
    return admitted


NUMBERS = st.floats() | st.sampled_from([0.0, 1.0, 100.0])
OPTIONS = st.builds(
    GenerateOptions,
    max_tokens=st.none() | st.integers(-2, 70),
    temperature=NUMBERS,
    top_k=st.integers(-1, 2**32),
    top_p=NUMBERS,
    min_p=NUMBERS,
    seed=st.none() | st.integers(-1, 2**64),
    repetition_penalty=NUMBERS,
    presence_penalty=NUMBERS,
    frequency_penalty=NUMBERS,
    logit_bias=st.dictionaries(st.integers(-1, 300), NUMBERS, max_size=2),
    stop=st.lists(st.text(max_size=3), max_size=2).map(tuple),
    stop_token_ids=st.lists(st.integers(-1, 300), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(-1, 20),
    n=st.integers(-1, 3),
    best_of=st.none() | st.integers(-1, 4),
    num_logprobs=st.none() | st.integers(-1, 21),
)
MILD = st.builds(
    GenerateOptions,
    max_tokens=st.none() | st.integers(0, 40),
    min_tokens=st.integers(0, 17),
    n=st.integers(1, 3),
    best_of=st.none() | st.integers(1, 4),
    num_logprobs=st.none() | st.integers(0, 20),
    seed=st.none() | st.integers(0, 2**64 - 1),
)


@given(
    prompts=st.lists(st.lists(st.integers(-1, 300), max_size=70), max_size=3),
    options=OPTIONS | MILD,
    default=st.sampled_from([None, 16]),
    echo=st.booleans(),
)
def test_whatever_is_admitted_can_be_served(
    prompts: list[list[int]], options: GenerateOptions, default: int | None, echo: bool
) -> None:
    try:
        admitted = jobs(prompts, options, default, echo=echo)
    except InvalidRequestError:
        return
    num_each = options.best_of or options.n
    assert len(admitted) == len(prompts) * num_each > 0
    for index, each in enumerate(admitted):
        prompt = prompts[index // num_each]
        assert prompt == each.prompt_token_ids.tolist() != []
        assert all(0 <= token_id < ENGINE.vocab_size for token_id in [*prompt, *each.stop_token_ids])
        assert each.max_tokens >= (0 if echo else 1)
        assert len(prompt) + each.max_tokens <= min(ENGINE.max_model_len, ENGINE.num_slots)
        assert options.max_tokens in {None, each.max_tokens}, "never clamped"
        assert each.sampling.min_tokens <= each.max_tokens
        assert sampling_fault(each.sampling) is None
        assert math.isfinite(each.sampling.temperature)
        assert each.stop_token_ids == set(options.stop_token_ids) | (set() if options.ignore_eos else EOS)
        assert (each.model, each.received_ns) == ("m", 5)
        scores = echo and options.num_logprobs is not None and len(prompt) > 1
        assert each.num_prompt_logprobs == (options.num_logprobs if scores else None)
        assert each.needs_engine == (each.max_tokens > 0 or scores)
        wanted = options.num_logprobs
        assert each.sampling.num_logprobs == (0 if wanted is None and num_each > options.n else wanted)


@pytest.mark.parametrize(
    ("num_slots", "num_prompt", "max_tokens"), [(48, 1, 47), (48, 47, 1), (640, 1, 63), (640, 63, 1)]
)
def test_a_conversation_may_go_on_to_the_end(num_slots: int, num_prompt: int, max_tokens: int) -> None:
    admitted = job([1] * num_prompt, GenerateOptions(), default=None, num_slots=num_slots)
    assert admitted.max_tokens == max_tokens


def test_a_prompt_that_is_only_scored_may_fill_the_context() -> None:
    assert job([1] * 64, GenerateOptions(max_tokens=0), echo=True, num_slots=64).max_tokens == 0
    with pytest.raises(InvalidRequestError, match=r"65 tokens; with a context of 64 tokens it may have 64; shorten"):
        job([1] * 65, GenerateOptions(max_tokens=0), echo=True, num_slots=65)


def test_sample_0_is_what_one_choice_alone_would_be() -> None:
    (alone,) = jobs([[1]], GenerateOptions(seed=7))
    several = jobs([[1], [1, 2]], GenerateOptions(seed=7, n=3))
    seeds = [each.sampling.seed for each in several]
    assert seeds[0] == alone.sampling.seed == 7
    assert seeds[:3] == seeds[3:]
    assert len(set(seeds)) == 3


def test_without_a_seed_no_two_outputs_share_one() -> None:
    assert len({each.sampling.seed for each in jobs([[1], [1]], GenerateOptions(n=4))}) == 8


@given(st.integers(0, 2**64 - 1))
def test_seeds_of_samples_differ(seed: int) -> None:
    seeds = [sample_seed(seed, sample) for sample in range(MAX_CHOICES)]
    assert seeds[0] == seed
    assert len(set(seeds)) == MAX_CHOICES
    assert all(0 <= each < 2**64 for each in seeds)


@pytest.mark.parametrize(
    ("num_prompts", "options", "message"),
    [
        (0, {}, "prompts is empty"),
        (1, {"n": 0}, "n is 0; it must be between 1 and 128"),
        (1, {"n": 129}, "n is 129; it must be between 1 and 128"),
        (1, {"n": 2, "best_of": 1}, "best_of is 1; it must be at least n, which is 2"),
        (1, {"best_of": 2, "max_tokens": 0}, "best_of is 2 with max_tokens 0"),
        (3, {"n": 50}, r"prompts \(3\) times n \(50\) are 150 choices; at most 128 are allowed"),
        (3, {"best_of": 50}, r"prompts \(3\) times best_of \(50\) are 150 choices"),
        (300, {}, r"prompts \(300\) times n \(1\) are 300 choices"),
    ],
)
def test_the_number_of_choices_is_bounded(num_prompts: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        count_candidates(GenerateOptions(**options), num_prompts)


def test_a_request_id_is_kept_or_made() -> None:
    assert parse_request_id("chat 1") == "chat 1"
    made = {parse_request_id("") for _ in range(10)}
    assert len(made) == 10


def test_the_limit_of_text_grows_with_the_context() -> None:
    check_text("text", 64 << 10, ENGINE)
    with pytest.raises(InvalidRequestError, match="text has 65537 bytes; at most 65536") as refused:
        check_text("text", (64 << 10) + 1, ENGINE)
    assert refused.value.field == "text"
    check_text("text", 4 << 20, dataclasses.replace(ENGINE, max_model_len=128 << 10))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 1e-300}, "top_p is 1e-300; it must be above 0"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty is 1e-300; it must be above 0"),
        ({"top_k": 1 << 32}, "top_k is 4294967296; it must be between 0 and 4294967295"),
    ],
)
def test_numbers_that_the_mesh_cannot_carry(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_options(GenerateOptions(**options), ENGINE)
