from __future__ import annotations

import itertools
import random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.load.arrivals import poisson_arrivals
from bench.load.request_options import Api, PromptFormat, RequestOptions
from bench.load.traces import (
    NUM_RESERVED_IDS,
    SHAREGPT_MEAN_INPUT_TOKENS,
    SHAREGPT_MEAN_OUTPUT_TOKENS,
    LengthRange,
    TraceConfig,
    TraceName,
    make_trace,
)
from bench.load.words import NUM_WORDS, text_of
from shared.errors import ConfigError

VOCAB_SIZE = 49152


@pytest.mark.parametrize("name", TraceName)
def test_a_seed_is_a_trace(name: TraceName) -> None:
    config = TraceConfig.of(name, num_requests=20, seed=7)
    trace = make_trace(config, vocab_size=VOCAB_SIZE)
    assert trace == make_trace(config, vocab_size=VOCAB_SIZE)
    assert trace != make_trace(TraceConfig.of(name, num_requests=20, seed=8), vocab_size=VOCAB_SIZE)
    longer = make_trace(TraceConfig.of(name, num_requests=30, seed=7), vocab_size=VOCAB_SIZE)
    assert longer[:20] == trace, "more requests go on where fewer end"


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from([TraceName.ORCA, TraceName.SHARED_PREFIX]),
    lengths=st.tuples(*[st.integers(1, 60)] * 4),
    vocab_size=st.integers(1, 1000),
    seed=st.integers(0, 2**31),
)
def test_lengths_and_ids_are_within_their_bounds(
    name: TraceName, lengths: tuple[int, ...], vocab_size: int, seed: int
) -> None:
    input_len, output_len = (LengthRange(*sorted(pair)) for pair in (lengths[:2], lengths[2:]))
    config = TraceConfig.of(
        name, num_requests=5, seed=seed, input_len=input_len, output_len=output_len, prefix_len=9, num_prefixes=2
    )
    prefix_len = 9 if name is TraceName.SHARED_PREFIX else 0
    trace = make_trace(config, vocab_size=vocab_size)
    assert len(trace) == 5
    for request in trace:
        assert input_len.low <= len(request.prompt) - prefix_len <= input_len.high
        assert output_len.low <= request.max_tokens <= output_len.high
        assert len(request.prompt) + request.max_tokens <= config.max_tokens
        assert all(0 <= token_id < vocab_size for token_id in request.prompt)
        if vocab_size > 2 * NUM_RESERVED_IDS:
            assert min(request.prompt) >= NUM_RESERVED_IDS


def test_orca_is_the_trace_of_the_paper() -> None:
    """Uniform lengths, drawn in the plain order, so that whoever draws so gets the same requests."""
    trace = make_trace(TraceConfig.of(TraceName.ORCA, num_requests=3000, seed=3), vocab_size=VOCAB_SIZE)
    rng = random.Random(3)
    for request in trace[:50]:
        prompt = tuple(rng.randrange(100, VOCAB_SIZE) for _ in range(rng.randint(32, 512)))
        assert (request.prompt, request.max_tokens) == (prompt, rng.randint(1, 128))
    assert fmean(len(request.prompt) for request in trace) == pytest.approx((32 + 512) / 2, rel=0.03)
    assert fmean(request.max_tokens for request in trace) == pytest.approx((1 + 128) / 2, rel=0.03)


def test_sharegpt_like_has_the_means_of_sharegpt_and_heavy_tails() -> None:
    config = TraceConfig.of(TraceName.SHAREGPT_LIKE, num_requests=4000, seed=1)
    trace = make_trace(config, vocab_size=VOCAB_SIZE)
    inputs = sorted(len(request.prompt) for request in trace)
    outputs = sorted(request.max_tokens for request in trace)
    assert fmean(inputs) == pytest.approx(SHAREGPT_MEAN_INPUT_TOKENS, rel=0.05)
    assert fmean(outputs) == pytest.approx(SHAREGPT_MEAN_OUTPUT_TOKENS, rel=0.05)
    for lengths in (inputs, outputs):
        assert lengths[0] >= 4
        assert lengths[-1] <= 1024
        assert lengths[len(lengths) // 2] < fmean(lengths) < lengths[int(0.9 * len(lengths))] / 1.5


def test_sharegpt_like_keeps_its_means_within_other_bounds_or_says_that_it_cannot() -> None:
    config = TraceConfig.of(
        TraceName.SHAREGPT_LIKE, num_requests=4000, input_len=LengthRange(1, 400), output_len=LengthRange(100, 2000)
    )
    trace = make_trace(config, vocab_size=300)
    assert fmean(len(request.prompt) for request in trace) == pytest.approx(SHAREGPT_MEAN_INPUT_TOKENS, rel=0.05)
    assert fmean(request.max_tokens for request in trace) == pytest.approx(SHAREGPT_MEAN_OUTPUT_TOKENS, rel=0.05)
    for impossible in (LengthRange(1, 100), LengthRange(200, 300), LengthRange(5, 5)):
        config = TraceConfig.of(TraceName.SHAREGPT_LIKE, num_requests=1, input_len=impossible)
        with pytest.raises(ConfigError, match="widen --input-len"):
            make_trace(config, vocab_size=300)


def test_prefixes_are_shared_and_what_follows_is_not() -> None:
    config = TraceConfig.of(TraceName.SHARED_PREFIX, num_requests=40, prefix_len=50, num_prefixes=3)
    trace = make_trace(config, vocab_size=VOCAB_SIZE)
    assert len({request.prompt[:50] for request in trace}) == 3
    assert len({request.prompt[50:] for request in trace}) == 40


def test_fixed_is_one_size() -> None:
    config = TraceConfig.of(TraceName.FIXED, num_requests=10, input_len=LengthRange(17, 17))
    trace = make_trace(config, vocab_size=VOCAB_SIZE)
    assert {(len(request.prompt), request.max_tokens) for request in trace} == {(17, 128)}
    assert len({request.prompt for request in trace}) == 10


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: LengthRange(0, 5), "LOW-HIGH"),
        (lambda: LengthRange(6, 5), "LOW-HIGH"),
        (lambda: TraceConfig.of(TraceName.ORCA, num_requests=0), "at least one request"),
        (
            lambda: TraceConfig.of(TraceName.FIXED, num_requests=1, input_len=LengthRange(1, 2)),
            "is one number, not 1-2",
        ),
        (lambda: make_trace(TraceConfig.of(TraceName.ORCA, num_requests=1), vocab_size=0), "at least one"),
        (lambda: poisson_arrivals(3, rate=0, seed=0), "positive number of requests per second"),
        (lambda: poisson_arrivals(3, rate=float("nan"), seed=0), "positive number of requests per second"),
        (lambda: poisson_arrivals(3, rate=1, burstiness=-1, seed=0), "positive number, 1 for a Poisson process"),
        (lambda: RequestOptions("m", Api.CHAT, PromptFormat.TOKEN_IDS), "--prompt-format text"),
    ],
)
def test_what_cannot_be_is_refused(wrong: object, said: str) -> None:
    assert callable(wrong)
    with pytest.raises(ConfigError, match=said):
        wrong()


def test_arrivals_are_a_poisson_process() -> None:
    arrivals = poisson_arrivals(20_000, rate=5.0, seed=4)
    assert arrivals == poisson_arrivals(20_000, rate=5.0, seed=4)
    assert arrivals != poisson_arrivals(20_000, rate=5.0, seed=5)
    assert arrivals[0] == 0
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    mean = fmean(gaps)
    assert min(gaps) >= 0
    assert mean == pytest.approx(0.2, rel=0.03)
    assert fmean((gap - mean) ** 2 for gap in gaps) == pytest.approx(0.2**2, rel=0.06), "an exponential's variance"


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_changes_the_variance_alone(burstiness: float) -> None:
    arrivals = poisson_arrivals(20_000, rate=5.0, seed=4, burstiness=burstiness)
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    mean = fmean(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    assert fmean((gap - mean) ** 2 for gap in gaps) == pytest.approx(0.2**2 / burstiness, rel=0.1)


@pytest.mark.parametrize("num_requests", [0, 1, 2])
def test_there_are_as_many_arrivals_as_requests(num_requests: int) -> None:
    assert len(poisson_arrivals(num_requests, rate=1.0, seed=0)) == num_requests


def test_prompts_have_all_words() -> None:
    config = TraceConfig.of(TraceName.FIXED, num_requests=50)
    trace = make_trace(config, vocab_size=NUM_RESERVED_IDS + NUM_WORDS)
    words = {word for request in trace for word in text_of(request.prompt).split(" ")}
    assert len(words) == NUM_WORDS


def test_words_stand_for_ids() -> None:
    text = text_of(range(2 * NUM_WORDS))
    words = text.split(" ")
    assert words[:NUM_WORDS] == words[NUM_WORDS:]
    assert len(set(words)) == NUM_WORDS
    assert all(word.isascii() and word.islower() for word in words)
