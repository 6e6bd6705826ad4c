"""Every message survives its translation, through real bytes; what strangers send ends in ProtocolError."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.codec import engine, generation, joining, session, steps
from shared.codec.step_columns import step_columns_from_pb
from shared.errors import InvalidRequestError, ProtocolError
from shared.generation import (
    ChatMessage,
    ChatRequest,
    Delta,
    Finish,
    GatewayStatus,
    GenerateOptions,
    GenerateRequest,
    Guidance,
    GuidanceKind,
    ModelInfo,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    ToolMode,
    TopLogprob,
    Usage,
)
from shared.ids import BlockId, Epoch, Handle, RequestId, Row, StepId
from shared.messages import (
    Cancel,
    Ended,
    EngineInfo,
    EngineStatus,
    FinishReason,
    Hello,
    Joined,
    JoinRequest,
    Loading,
    NewSequence,
    PromptLogprobs,
    Registration,
    SamplingParams,
    SessionEvents,
    StepPlan,
    StepResult,
    StepTiming,
    Submit,
    TokenLogprobs,
    WorkerStatus,
    token_ids,
)
from shared.pb import common_pb2, gateway_pb2, scheduler_pb2, worker_pb2
from shared.status import StatusCode
from tests.fakes.plans import as_plan

if TYPE_CHECKING:
    from collections.abc import Callable

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
text = st.text(st.characters(blacklist_categories=["Cs"]), max_size=20)
real32 = st.floats(width=32, allow_nan=False)
real = st.floats(allow_nan=False)
ids = st.lists(u32, max_size=6)
id_arrays = ids.map(token_ids)
id_tuples = ids.map(tuple)

biases = st.dictionaries(u32, real32, max_size=3)
sampling = st.builds(
    SamplingParams,
    temperature=real32,
    top_k=u32,
    top_p=real32,
    min_p=real32,
    seed=u64,
    repetition_penalty=real32,
    presence_penalty=real32,
    frequency_penalty=real32,
    logit_bias=biases.map(lambda bias: tuple(sorted(bias.items()))),
    min_tokens=u32,
    num_logprobs=st.none() | u32,
)
token_logprobs = st.builds(TokenLogprobs, real32, st.lists(st.tuples(u32, real32), max_size=3).map(tuple))
prompt_logprobs = st.builds(PromptLogprobs, u32, st.lists(token_logprobs, max_size=3).map(tuple))
logprobs_by_index = st.dictionaries(u32, token_logprobs, max_size=3).map(lambda found: dict(sorted(found.items())))
engine_infos = st.builds(EngineInfo, text, u32, u32, u32, u32, u32, u32, text)
worker_statuses = st.builds(WorkerStatus, u32, u32, text, text, text)
engine_statuses = st.builds(
    EngineStatus,
    ready=st.booleans(),
    reason=text,
    epoch=u64,
    info=st.none() | engine_infos,
    workers=st.lists(worker_statuses, max_size=3).map(tuple),
    num_running=u32,
    num_waiting=u32,
    num_in_flight_steps=u32,
    num_used_slots=u32,
    num_cached_slots=u32,
    num_preempted=u32,
    num_preemptions=u64,
    num_prompt_tokens=u64,
    num_cached_prompt_tokens=u64,
    num_broken_invariants=u64,
    num_steps=u64,
    num_output_tokens=u64,
    num_finished=u64,
    last_batch_size=u32,
    last_batch_tokens=u32,
)
handles = u64.map(Handle)
session_requests = st.one_of(
    st.builds(Hello, text),
    st.builds(Cancel, handles),
    st.builds(
        Submit,
        handle=handles,
        request_id=text.map(RequestId),
        prompt_token_ids=id_arrays,
        max_tokens=u32,
        sampling=sampling,
        stop_token_ids=ids.map(frozenset),
        output_token_ids=id_arrays,
        num_prompt_logprobs=st.none() | u32,
        grammar=text,
        traceparent=text,
    ),
)
ended = st.builds(
    Ended, handles, st.sampled_from(FinishReason), st.sampled_from(StatusCode), text, u64, u64, u64, u32, u32
)
session_events = st.lists(st.tuples(handles, u32), max_size=5).flatmap(
    lambda tokens: st.builds(
        SessionEvents,
        token_handles=st.just([handle for handle, _ in tokens]),
        token_ids=st.just([token for _, token in tokens]),
        ended=st.lists(ended, max_size=3),
        engine_ready=st.none() | engine_infos,
        engine_lost=st.booleans(),
        token_logprobs=logprobs_by_index,
        prompt_logprobs=st.lists(st.tuples(handles, prompt_logprobs), max_size=2),
    )
)
registrations = st.builds(Registration, u32, u32, text, text, text)
join_requests = st.builds(
    JoinRequest,
    epoch=u64.map(Epoch),
    stage=u32,
    tp_rank=u32,
    num_stages=u32,
    tp_size=u32,
    rendezvous_address=text,
    model=text,
    dtype=text,
    block_size=u32,
    kv_memory_bytes=u64,
    max_model_len=u32,
    next_stage_address=text,
    tp_addresses=st.lists(text, max_size=3).map(tuple),
    collective_timeout_s=u32,
)
join_progress = st.builds(Loading, text, u64, u64) | st.builds(Joined, u32, u32, u32, text, u64, u64)


@st.composite
def step_plans(draw: st.DrawFn) -> StepPlan:
    size = draw(st.integers(0, 4))

    def column(values: st.SearchStrategy[Any]) -> Any:
        return draw(st.lists(values, min_size=size, max_size=size))

    num_appended = column(st.integers(0, 3))
    num_new_blocks = column(st.integers(0, 3))
    total_appended, total_blocks = sum(num_appended), sum(num_new_blocks)
    new_sequences = st.builds(
        NewSequence,
        row=u32.map(Row),
        request_id=text.map(RequestId),
        token_ids=id_arrays,
        num_prompt_tokens=u32,
        sampling=sampling,
        stop_token_ids=ids.map(frozenset),
        num_prompt_logprobs=st.none() | u32,
        grammar=text,
        traceparent=text,
    )
    return StepPlan(
        epoch=Epoch(draw(u64)),
        step_id=StepId(draw(u64)),
        rows=column(u32.map(Row)),
        num_computed_tokens=column(u32),
        num_tokens=column(u32),
        samples=column(st.booleans()),
        num_appended_tokens=num_appended,
        appended_token_ids=draw(st.lists(u32, min_size=total_appended, max_size=total_appended)),
        num_new_blocks=num_new_blocks,
        new_block_ids=draw(st.lists(u32.map(BlockId), min_size=total_blocks, max_size=total_blocks)),
        new_sequences=draw(st.lists(new_sequences, max_size=2)),
        released_rows=draw(st.lists(u32.map(Row), max_size=3)),
    )


step_results = st.builds(
    StepResult,
    epoch=u64.map(Epoch),
    step_id=u64.map(StepId),
    token_ids=ids,
    invalid=ids,
    compute_ns=u64,
    logprobs=logprobs_by_index,
    prompt_logprobs=st.dictionaries(u32, prompt_logprobs, max_size=2),
)
guidances = st.one_of(
    st.just(Guidance(GuidanceKind.JSON_OBJECT)),
    st.builds(Guidance, st.sampled_from([GuidanceKind.JSON_SCHEMA, GuidanceKind.REGEX, GuidanceKind.GRAMMAR]), text),
    st.builds(Guidance, st.just(GuidanceKind.CHOICES), choices=st.lists(text, max_size=3).map(tuple)),
)
options = st.builds(
    GenerateOptions,
    max_tokens=st.none() | st.integers(-(2**31), 2**31 - 1),
    temperature=real32,
    top_k=u32,
    top_p=real32,
    min_p=real32,
    seed=st.none() | u64,
    repetition_penalty=real32,
    presence_penalty=real32,
    frequency_penalty=real32,
    logit_bias=biases,
    stop=st.lists(text, max_size=3).map(tuple),
    stop_token_ids=id_tuples,
    ignore_eos=st.booleans(),
    min_tokens=u32,
    n=u32,
    best_of=st.none() | u32,
    num_logprobs=st.none() | u32,
    guidance=st.none() | guidances,
    timeout_s=st.none() | real,
)
generate_requests = st.builds(
    GenerateRequest,
    prompts=st.lists(text | id_arrays, max_size=3),
    options=options,
    echo=st.booleans(),
    request_id=text,
    return_prompt_token_ids=st.booleans(),
)
chat_messages = st.builds(
    ChatMessage,
    role=text,
    content=text,
    tool_calls=st.lists(st.builds(ToolCall, text, text, text), max_size=2).map(tuple),
    tool_call_id=text,
    name=text,
)
tool_choices = st.builds(ToolChoice, st.sampled_from([ToolMode.AUTO, ToolMode.NONE, ToolMode.REQUIRED])) | st.builds(
    ToolChoice, st.just(ToolMode.NAMED), text
)
chat_requests = st.builds(
    ChatRequest,
    messages=st.lists(chat_messages, max_size=3),
    options=options,
    tools=st.lists(st.builds(Tool, text, text, text), max_size=2),
    tool_choice=tool_choices,
    continue_final_message=st.booleans(),
    request_id=text,
    parallel_tool_calls=st.booleans(),
    return_prompt_token_ids=st.booleans(),
)
finishes = st.builds(
    Finish,
    reason=st.sampled_from(FinishReason),
    num_output_tokens=u32,
    queue_ms=real,
    prefill_ms=real,
    decode_ms=real,
    num_cached_tokens=u32,
    num_preemptions=u32,
    stop=st.none() | text | u32,
)
top_logprobs = st.builds(TopLogprob, u32, text, st.binary(max_size=4), real32)
deltas = st.builds(
    Delta,
    text=text,
    token_ids=id_tuples,
    finish=st.none() | finishes,
    request_id=text,
    choice=u32,
    logprobs=st.lists(
        st.builds(
            TokenLogprob,
            token_id=u32,
            token=text,
            token_bytes=st.binary(max_size=4),
            logprob=st.none() | real32,
            top=st.lists(top_logprobs, max_size=2).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
    is_prompt=st.booleans(),
    tool_calls=st.lists(st.builds(ToolCallDelta, u32, text, text, text), max_size=2).map(tuple),
    usage=st.none() | st.builds(Usage, u32, u32, u32),
    prompt_token_ids=st.lists(id_tuples, max_size=2).map(tuple),
)
model_infos = st.builds(ModelInfo, engine_infos, id_tuples, st.booleans())
gateway_statuses = st.builds(GatewayStatus, engine_statuses, u32)


def plan_from_pb(message: worker_pb2.StepPlan) -> StepPlan:
    return as_plan(step_columns_from_pb(message))


ROUND_TRIPS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "SamplingParams": (sampling, engine.sampling_to_pb, engine.sampling_from_pb),
    "EngineInfo": (engine_infos, engine.engine_info_to_pb, engine.engine_info_from_pb),
    "EngineStatus": (engine_statuses, engine.engine_status_to_pb, engine.engine_status_from_pb),
    "SessionRequest": (session_requests, session.session_request_to_pb, session.session_request_from_pb),
    "SessionEvents": (session_events, session.session_events_to_pb, session.session_events_from_pb),
    "Registration": (registrations, joining.registration_to_pb, joining.registration_from_pb),
    "JoinRequest": (join_requests, joining.join_request_to_pb, joining.join_request_from_pb),
    "JoinProgress": (join_progress, joining.join_progress_to_pb, joining.join_progress_from_pb),
    "StepPlan": (step_plans(), steps.step_plan_to_pb, plan_from_pb),
    "StepResult": (step_results, steps.step_result_to_pb, steps.step_result_from_pb),
    "GenerateOptions": (options, generation.options_to_pb, generation.options_from_pb),
    "GenerateRequest": (generate_requests, generation.generate_to_pb, generation.generate_from_pb),
    "ChatRequest": (chat_requests, generation.chat_to_pb, generation.chat_from_pb),
    "Delta": (deltas, generation.delta_to_pb, generation.delta_from_pb),
    "ModelInfo": (model_infos, generation.model_info_to_pb, generation.model_info_from_pb),
    "GatewayStatus": (gateway_statuses, generation.gateway_status_to_pb, generation.gateway_status_from_pb),
}


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize("name", ROUND_TRIPS)
@given(data=st.data())
def test_round_trip(name: str, data: st.DataObject) -> None:
    strategy, to_pb, from_pb = ROUND_TRIPS[name]
    message = data.draw(strategy)
    assert from_pb(over_the_wire(to_pb(message))) == message


def test_every_translation_is_tried() -> None:
    tried = {function.__name__ for _, *pair in ROUND_TRIPS.values() for function in pair}
    tried |= {"timeline_to_pb", "timeline_from_pb"}
    tried -= {"plan_from_pb"}  # what workers have of it is in ``step_columns``
    assert tried == {name for module in (engine, generation, joining, session, steps) for name in module.__all__}


@given(st.lists(st.builds(StepTiming, u64.map(StepId), u64, u64, u64, u32, u32, u32), max_size=4), u32, u32, u64)
def test_timeline(timings: list[StepTiming], stage: int, tp_rank: int, now_ns: int) -> None:
    message = over_the_wire(steps.timeline_to_pb(stage, tp_rank, timings, now_ns))
    assert (message.stage, message.tp_rank, message.now_ns) == (stage, tp_rank, now_ns)
    assert steps.timeline_from_pb(message) == timings


def test_absent_fields_take_the_defaults_of_the_contract() -> None:
    assert engine.sampling_from_pb(common_pb2.SamplingParams()) == SamplingParams()
    assert generation.options_from_pb(gateway_pb2.GenerationOptions()) == GenerateOptions()
    assert generation.generate_from_pb(gateway_pb2.GenerateRequest()) == GenerateRequest([])
    assert generation.chat_from_pb(gateway_pb2.ChatRequest()) == ChatRequest([], tools=[])


def test_a_prompt_that_is_neither_text_nor_ids_is_refused() -> None:
    message = gateway_pb2.GenerateRequest(prompts=[gateway_pb2.Prompt(text=""), gateway_pb2.Prompt()])
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\] is empty; set text or token_ids"):
        generation.generate_from_pb(message)


@pytest.mark.parametrize(
    "translate",
    [
        lambda: session.session_request_from_pb(scheduler_pb2.SessionRequest()),
        lambda: joining.join_progress_from_pb(worker_pb2.JoinProgress()),
        lambda: session.session_events_from_pb(scheduler_pb2.SessionEvents(ended=[scheduler_pb2.Ended(handle=1)])),
        lambda: generation.delta_from_pb(gateway_pb2.GenerateResponse(finish=gateway_pb2.Finish())),
    ],
    ids=["session request", "join progress", "finish reason of the session", "finish reason of the stream"],
)
def test_unknown_kinds_are_refused(translate: Callable[[], object]) -> None:
    with pytest.raises(ProtocolError, match="different versions"):
        translate()


@pytest.mark.parametrize(
    ("message", "lengths"),
    [
        (
            worker_pb2.StepPlan(step_id=3, rows=[1]),
            "rows: 1, num_computed_tokens: 0, num_tokens: 0, samples: 0, num_appended_tokens: 0, num_new_blocks: 0",
        ),
        (worker_pb2.StepPlan(step_id=3, samples=[True, False]), "samples: 2"),
        (
            worker_pb2.StepPlan(step_id=3, appended_token_ids=[7]),
            "sum of num_appended_tokens: 0, appended_token_ids: 1",
        ),
        (worker_pb2.StepPlan(step_id=3, new_block_ids=[7]), "sum of num_new_blocks: 0, new_block_ids: 1"),
    ],
)
def test_plans_whose_columns_disagree_are_refused(message: worker_pb2.StepPlan, lengths: str) -> None:
    with pytest.raises(ProtocolError, match=f"^step 3 has columns of unequal length .*{lengths}"):
        step_columns_from_pb(message)


def test_plan_that_brings_nothing_has_no_columns_of_it() -> None:
    columns = step_columns_from_pb(
        worker_pb2.StepPlan(
            rows=[2**32 - 1],
            num_computed_tokens=[0],
            num_tokens=[1],
            samples=[True],
            num_appended_tokens=[0],
            num_new_blocks=[0],
        )
    )
    assert columns.rows.tolist() == [2**32 - 1]
    assert columns.appended_tokens is None
    assert columns.new_blocks is None


def test_events_and_timelines_whose_columns_disagree_are_refused() -> None:
    with pytest.raises(ProtocolError, match="token_handles: 1, token_ids: 0"):
        session.session_events_from_pb(scheduler_pb2.SessionEvents(token_handles=[1]))
    with pytest.raises(ProtocolError, match="unequal length"):
        steps.timeline_from_pb(worker_pb2.GetTimelineResponse(step_ids=[1]))


def test_a_status_of_the_future_is_unknown() -> None:
    message = scheduler_pb2.Ended(handle=1, reason=common_pb2.FINISH_REASON_ERROR, error_code=99)
    (event,) = session.session_events_from_pb(scheduler_pb2.SessionEvents(ended=[message])).ended
    assert event.error_code is StatusCode.UNKNOWN


def test_what_does_not_fit_into_its_field_is_not_sent() -> None:
    for asked in (GenerateOptions(top_k=-1), GenerateOptions(seed=2**64), GenerateOptions(max_tokens=2**31)):
        with pytest.raises(ValueError, match="range"):
            generation.options_to_pb(asked)
