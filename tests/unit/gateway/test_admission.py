from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.admission import (
    GenerateJob,
    build_job,
    check_options,
    check_text,
    parse_request_id,
)
from shared.errors import InvalidRequestError
from shared.generation import GenerateOptions
from shared.ids import RequestId
from shared.messages import EngineInfo

ENGINE = EngineInfo("m", 64, 300, 48, 16, 1, 1, "float32")
EOS = frozenset({256})


def job(prompt: list[int], options: GenerateOptions, default: int | None = 16, **engine: Any) -> GenerateJob:
    info = dataclasses.replace(ENGINE, **engine)
    check_options(options, info)
    return build_job(
        RequestId("r"), prompt, options, info, eos_token_ids=EOS, default_max_tokens=default, received_ns=5
    )


NUMBERS = st.floats() | st.sampled_from([0.0, 1.0, 100.0])
OPTIONS = st.builds(
    GenerateOptions,
    max_tokens=st.none() | st.integers(-2, 70),
    temperature=NUMBERS,
    top_k=st.integers(-1, 2**32),
    top_p=NUMBERS,
    min_p=NUMBERS,
    seed=st.none() | st.integers(-1, 2**64),
    stop_token_ids=st.lists(st.integers(-1, 300), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
)


@given(
    prompt=st.lists(st.integers(-1, 300), max_size=70),
    options=OPTIONS | st.builds(GenerateOptions, max_tokens=st.none() | st.integers(1, 40)),
    default=st.sampled_from([None, 16]),
)
def test_whatever_is_admitted_can_be_served(prompt: list[int], options: GenerateOptions, default: int | None) -> None:
    try:
        admitted = job(prompt, options, default)
    except InvalidRequestError:
        return
    ids = [*admitted.prompt_token_ids, *admitted.stop_token_ids]
    assert prompt == admitted.prompt_token_ids.tolist() != []
    assert all(0 <= token_id < ENGINE.vocab_size for token_id in ids)
    assert admitted.max_tokens >= 1
    assert len(prompt) + admitted.max_tokens <= min(ENGINE.max_model_len, ENGINE.num_slots)
    assert options.max_tokens in {None, admitted.max_tokens}, "never clamped"
    sampling = admitted.sampling
    assert math.isfinite(sampling.temperature)
    assert 0 <= sampling.temperature <= 100
    assert 0 < sampling.top_p <= 1
    assert 0 <= sampling.min_p <= 1
    assert 0 <= sampling.top_k < 2**32
    assert 0 <= sampling.seed < 2**64
    assert admitted.stop_token_ids == set(options.stop_token_ids) | (set() if options.ignore_eos else EOS)
    assert (admitted.model, admitted.received_ns) == ("m", 5)


@pytest.mark.parametrize(
    ("num_slots", "num_prompt", "max_tokens"), [(48, 1, 47), (48, 47, 1), (640, 1, 63), (640, 63, 1)]
)
def test_a_conversation_may_go_on_to_the_end(num_slots: int, num_prompt: int, max_tokens: int) -> None:
    admitted = job([1] * num_prompt, GenerateOptions(), default=None, num_slots=num_slots)
    assert admitted.max_tokens == max_tokens


def test_a_request_id_is_kept_or_made() -> None:
    assert parse_request_id("chat 1") == "chat 1"
    made = {parse_request_id("") for _ in range(10)}
    assert len(made) == 10


def test_the_limit_of_text_grows_with_the_context() -> None:
    check_text("text", 64 << 10, ENGINE)
    with pytest.raises(InvalidRequestError, match="text has 65537 bytes; at most 65536"):
        check_text("text", (64 << 10) + 1, ENGINE)
    check_text("text", 4 << 20, dataclasses.replace(ENGINE, max_model_len=128 << 10))
