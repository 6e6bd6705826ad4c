from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.codec.generation import (
    chat_from_pb,
    chat_to_pb,
    delta_from_pb,
    delta_to_pb,
    gateway_status_from_pb,
    gateway_status_to_pb,
    generate_to_pb,
    model_info_from_pb,
    model_info_to_pb,
    options_from_pb,
    options_to_pb,
    prompt_from_pb,
)
from shared.errors import ProtocolError
from shared.generation import ChatMessage, Delta, Finish, GatewayStatus, GenerateOptions, ModelInfo
from shared.messages import EngineInfo, EngineStatus, FinishReason, WorkerStatus
from shared.pb import gateway_pb2

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple)
FLOATS = st.floats(width=32, allow_nan=False)
INFO = EngineInfo("m", 64, 300, 48, 16, 2, 1, "float32")


@given(
    st.builds(
        GenerateOptions,
        max_tokens=st.none() | st.integers(-(2**31), 2**31 - 1),
        temperature=FLOATS,
        top_k=st.integers(0, 2**32 - 1),
        top_p=FLOATS,
        min_p=FLOATS,
        seed=st.none() | st.integers(0, 2**64 - 1),
        stop_token_ids=TOKEN_IDS,
        ignore_eos=st.booleans(),
    )
)
def test_options_survive(options: GenerateOptions) -> None:
    assert options_from_pb(options_to_pb(options)) == options


def test_absent_options_are_the_defaults() -> None:
    assert options_from_pb(gateway_pb2.GenerationOptions()) == GenerateOptions()


@given(TEXT | TOKEN_IDS, TEXT)
def test_prompts_survive(prompt: str | tuple[int, ...], request_id: str) -> None:
    request = generate_to_pb(prompt, GenerateOptions(), request_id)
    got = prompt_from_pb(request)
    assert request.request_id == request_id
    assert (got if isinstance(got, str) else tuple(got or ())) == prompt
    assert got is not None, "an empty prompt is not a missing one"


def test_a_missing_prompt_is_none() -> None:
    assert prompt_from_pb(gateway_pb2.GenerateRequest()) is None


def test_conversations_survive() -> None:
    messages = [ChatMessage("system", "be brief"), ChatMessage("user", "")]
    assert chat_from_pb(chat_to_pb(messages, GenerateOptions(), "r")) == messages


@given(
    st.builds(
        Delta,
        text=TEXT,
        token_ids=TOKEN_IDS,
        request_id=TEXT,
        finish=st.none()
        | st.builds(
            Finish,
            reason=st.sampled_from(FinishReason),
            num_prompt_tokens=st.integers(0, 2**32 - 1),
            num_output_tokens=st.integers(0, 2**32 - 1),
            queue_ms=st.floats(allow_nan=False),
            prefill_ms=st.floats(allow_nan=False),
            decode_ms=st.floats(allow_nan=False),
        ),
    )
)
def test_deltas_survive(delta: Delta) -> None:
    assert delta_from_pb(delta_to_pb(delta)) == delta


def test_an_unknown_finish_reason_is_refused() -> None:
    message = gateway_pb2.GenerateResponse(finish=gateway_pb2.Finish())
    with pytest.raises(ProtocolError, match="unknown finish reason 0"):
        delta_from_pb(message)


def test_model_info_and_status_survive() -> None:
    info = ModelInfo(INFO, (1, 2), has_chat_template=True)
    assert model_info_from_pb(model_info_to_pb(info)) == info
    engine = EngineStatus(
        ready=True,
        reason="",
        epoch=3,
        info=INFO,
        workers=(WorkerStatus(0, 0, "h:1", "ready"),),
        num_running=1,
        num_steps=2**40,
    )
    status = GatewayStatus(engine, 7)
    assert gateway_status_from_pb(gateway_status_to_pb(status)) == status
