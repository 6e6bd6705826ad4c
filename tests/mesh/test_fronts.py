"""One suite over both public fronts of a live mesh: the same request gets the same answer through either."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import openai
import pydantic
import pytest
import pytest_asyncio

from services.mesh.local_mesh import LocalMesh
from services.mesh.options import MeshOptions
from shared.client import GatewayClient
from shared.config import EngineConfig
from shared.errors import OrcaError
from shared.generation import (
    ChatMessage,
    ChatRequest,
    GenerateOptions,
    GenerateRequest,
    Guidance,
    GuidanceKind,
    Tool,
    ToolChoice,
    ToolMode,
)
from shared.status import StatusCode
from shared.topology import Topology
from tests.mesh.fronts import Answer, Front, GrpcFront, HttpFront, RefusedError
from tests.mesh.small_models import write_chat_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

GREEDY = GenerateOptions(max_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = GenerateOptions(max_tokens=16, temperature=1.0, seed=11, ignore_eos=True)


class Mesh:
    """A live mesh with a client of each front."""

    def __init__(self, grpc: GatewayClient, http: openai.AsyncOpenAI, model: str) -> None:
        self.client = grpc
        self.openai = http
        self.model = model
        self.fronts: dict[str, Front] = {"grpc": GrpcFront(grpc), "http": HttpFront(http, model)}

    async def idle(self) -> None:
        """Wait until no request is in the engine and nothing owns K/V."""
        async with asyncio.timeout(10):
            while True:
                engine = (await self.client.status()).engine
                if not (engine.num_running or engine.num_waiting or engine.num_used_slots):
                    return


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=[1, 2], ids=["one-stage", "two-stages"])
async def mesh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    model = str(write_chat_model(tmp_path_factory.mktemp("models") / "small"))
    options = MeshOptions(engine=EngineConfig(model=model, topology=Topology(request.param)))
    async with (
        LocalMesh(options) as running,
        GatewayClient(running.gateway_address) as grpc,
        openai.AsyncOpenAI(base_url=f"{running.http_address}/v1", api_key="none", max_retries=0) as http,
    ):
        served = (await http.models.list()).data[0].id
        yield Mesh(grpc, http, served)


@pytest.fixture(params=["grpc", "http"])
def front(request: pytest.FixtureRequest, mesh: Mesh) -> Front:
    return mesh.fronts[request.param]


async def through_all(mesh: Mesh, request: GenerateRequest | ChatRequest) -> Answer:
    """The answer through every front, streamed and not, which must be the same."""
    answers = []
    for front in mesh.fronts.values():
        for stream in (True, False):
            if isinstance(request, GenerateRequest):
                answers.append(await front.generate(request, stream=stream))
            else:
                answers.append(await front.chat(request, stream=stream))
    for answer in answers[1:]:
        assert [choice.text for choice in answer.choices] == [choice.text for choice in answers[0].choices]
        assert [choice.finish_reason for choice in answer.choices] == [c.finish_reason for c in answers[0].choices]
        assert [choice.token_ids for choice in answer.choices] == [choice.token_ids for choice in answers[0].choices]
        assert [choice.tool_calls for choice in answer.choices] == [choice.tool_calls for choice in answers[0].choices]
        assert answer.num_prompt_tokens == answers[0].num_prompt_tokens
        assert answer.num_output_tokens == answers[0].num_output_tokens
    return answers[0]


async def test_a_prompt_is_continued(mesh: Mesh) -> None:
    answer = await through_all(mesh, GenerateRequest(["the inner"], GREEDY))
    [choice] = answer.choices
    assert choice.finish_reason == "length"
    assert len(choice.token_ids) == answer.num_output_tokens == 24


async def test_prompts_as_texts_and_as_ids_in_their_order(mesh: Mesh) -> None:
    texts = ["one", "two two two", "three"]
    token_ids = [await mesh.client.tokenize(text) for text in texts]
    options = replace(SAMPLED, n=2)
    by_text = await through_all(mesh, GenerateRequest(texts, options, echo=True))
    by_ids = await through_all(mesh, GenerateRequest(token_ids, options, echo=True))
    assert len(by_text.choices) == 6
    assert [choice.text for choice in by_text.choices] == [choice.text for choice in by_ids.choices]
    for index, choice in enumerate(by_text.choices):
        assert choice.text.startswith(texts[index // 2])
    assert by_text.choices[0].text != by_text.choices[1].text
    assert by_text.num_prompt_tokens == sum(map(len, token_ids))
    assert by_text.num_output_tokens == 6 * 16


async def test_the_first_choice_of_a_seed_is_the_only_one_of_n_1(mesh: Mesh) -> None:
    one = await through_all(mesh, GenerateRequest(["seeded"], SAMPLED))
    three = await through_all(mesh, GenerateRequest(["seeded"], replace(SAMPLED, n=3)))
    assert one.choices[0].text == three.choices[0].text
    other = await through_all(mesh, GenerateRequest(["seeded"], replace(SAMPLED, seed=12)))
    assert other.choices[0].text != one.choices[0].text


async def test_best_of_returns_the_most_likely(front: Front) -> None:
    options = replace(SAMPLED, n=4, num_logprobs=0)
    four = await front.generate(GenerateRequest(["best"], options))
    best = await front.generate(GenerateRequest(["best"], replace(SAMPLED, n=1, best_of=4)), stream=False)
    likely = max(four.choices, key=lambda choice: sum(p or 0.0 for p in choice.logprobs) / len(choice.logprobs))
    assert [choice.text for choice in best.choices] == [likely.text]
    assert best.num_output_tokens == 4 * 16


async def test_stop_strings_never_leak(mesh: Mesh) -> None:
    whole = (await through_all(mesh, GenerateRequest(["stop here"], GREEDY))).choices[0].text
    pairs = [whole[start : start + 2] for start in range(len(whole) - 1)]
    stops = [pair for pair in pairs if "\ufffd" not in pair][:3]  # bytes that are no character match no string
    assert stops
    for stop in stops:
        cut = await through_all(mesh, GenerateRequest(["stop here"], replace(GREEDY, stop=(stop,))))
        assert cut.choices[0].text == whole[: whole.index(stop)]
        assert cut.choices[0].finish_reason == "stop"
    await mesh.idle()


async def test_stop_token_ids_and_ignore_eos(mesh: Mesh) -> None:
    whole = (await through_all(mesh, GenerateRequest(["stop ids"], GREEDY))).choices[0]
    stop = whole.token_ids[6]
    cut = await through_all(mesh, GenerateRequest(["stop ids"], replace(GREEDY, stop_token_ids=(stop,))))
    assert cut.choices[0].token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert cut.choices[0].finish_reason == "stop"
    later = replace(GREEDY, stop_token_ids=(stop,), min_tokens=12)
    kept = await through_all(mesh, GenerateRequest(["stop ids"], later))
    assert stop not in kept.choices[0].token_ids[:12]
    assert len(kept.choices[0].token_ids) >= 12


async def test_log_probabilities_of_each_token(mesh: Mesh) -> None:
    request = GenerateRequest(["likely"], replace(SAMPLED, num_logprobs=5, stop=("zzzz",)))
    answer = await through_all(mesh, request)
    assert len(answer.choices[0].logprobs) == len(answer.choices[0].token_ids)
    assert (
        b"".join(answer.choices[0].token_bytes) == answer.choices[0].text.encode() or "\ufffd" in answer.choices[0].text
    )
    assert all(logprob is not None and -9999 <= logprob <= 0 for logprob in answer.choices[0].logprobs)
    over_http = await mesh.fronts["http"].generate(request, stream=False)
    assert over_http.choices[0].logprobs == pytest.approx(answer.choices[0].logprobs)
    assert [len(top) >= 5 for top in over_http.choices[0].top_logprobs].count(False) == 0


async def test_a_prompt_is_scored_and_nothing_generated(mesh: Mesh) -> None:
    text = "the score of this"
    options = replace(GREEDY, max_tokens=0, num_logprobs=1)
    answer = await through_all(mesh, GenerateRequest([text], options, echo=True))
    [choice] = answer.choices
    assert choice.text == text
    assert choice.token_ids == await mesh.client.tokenize(text)
    assert answer.num_output_tokens == 0
    assert choice.logprobs[0] is None
    assert all(logprob is not None and logprob < 0 for logprob in choice.logprobs[1:])
    # The same probabilities as when the model generates the tokens itself.
    generated = await through_all(mesh, GenerateRequest([choice.token_ids], replace(GREEDY, num_logprobs=1)))
    again = GenerateRequest([choice.token_ids + generated.choices[0].token_ids], options, echo=True)
    scored = (await through_all(mesh, again)).choices[0].logprobs[len(choice.token_ids) :]
    assert scored == pytest.approx(generated.choices[0].logprobs, abs=1e-3)


async def test_logit_bias_forces_and_bars(mesh: Mesh) -> None:
    forced = await through_all(mesh, GenerateRequest(["bias"], replace(SAMPLED, logit_bias={65: 100.0})))
    assert set(forced.choices[0].token_ids) == {65}
    plain = await through_all(mesh, GenerateRequest(["bias"], GREEDY))
    first = plain.choices[0].token_ids[0]
    barred = await through_all(mesh, GenerateRequest(["bias"], replace(GREEDY, logit_bias={first: -100.0})))
    assert first not in barred.choices[0].token_ids


async def test_penalties_make_repetitions_rarer(mesh: Mesh) -> None:
    bias = dict.fromkeys(range(65, 69), 50.0)  # only four tokens are likely
    plain = await through_all(mesh, GenerateRequest(["penalty"], replace(GREEDY, max_tokens=4, logit_bias=bias)))
    fair = replace(
        GREEDY, max_tokens=4, logit_bias=bias, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=2.0
    )
    penalised = await through_all(mesh, GenerateRequest(["penalty"], fair))
    assert len(set(penalised.choices[0].token_ids)) >= len(set(plain.choices[0].token_ids))
    assert len(set(penalised.choices[0].token_ids)) > 1


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


async def test_a_json_schema_is_matched(mesh: Mesh) -> None:
    guidance = Guidance(GuidanceKind.JSON_SCHEMA, json.dumps(SCHEMA))
    options = GenerateOptions(max_tokens=200, temperature=1.0, seed=3, guidance=guidance)
    chat = await through_all(mesh, ChatRequest([ChatMessage("user", "Who?")], options))
    for answer in (chat, await through_all(mesh, GenerateRequest(["Who?"], options))):
        assert answer.choices[0].finish_reason == "stop"
        value = json.loads(answer.choices[0].text)
        assert set(value) == {"name", "age"}
        assert 0 <= value["age"] <= 99


@pytest.mark.parametrize(
    ("guidance", "pattern"),
    [
        (Guidance(GuidanceKind.REGEX, "[ab]{3}-[0-9]+x"), r"[ab]{3}-[0-9]+x"),
        (Guidance(GuidanceKind.CHOICES, choices=("yes", "no", "maybe")), r"yes|no|maybe"),
        (Guidance(GuidanceKind.GRAMMAR, 'start: "(" start ")" | "x"'), r"\(*x\)*"),
    ],
    ids=["regex", "choices", "grammar"],
)
async def test_other_guidance_is_matched(front: Front, guidance: Guidance, pattern: str) -> None:
    options = GenerateOptions(
        max_tokens=100, temperature=1.0, seed=5, guidance=guidance, logit_bias={ord("x") - 33: 10.0}
    )
    answer = await front.generate(GenerateRequest(["go: "], options))
    assert re.fullmatch(pattern, answer.choices[0].text) or answer.choices[0].finish_reason == "length"


async def test_json_is_cut_not_repaired_at_max_tokens(front: Front) -> None:
    options = GenerateOptions(max_tokens=3, temperature=0.0, guidance=Guidance(GuidanceKind.JSON_OBJECT))
    answer = await front.chat(ChatRequest([ChatMessage("user", "JSON")], options))
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].token_ids) == 3
    assert answer.choices[0].text.startswith("{")


async def test_a_tool_is_called(mesh: Mesh) -> None:
    parameters = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    tools = [Tool("weather", "Tells the weather.", json.dumps(parameters))]
    for choice in (ToolChoice(ToolMode.REQUIRED), ToolChoice(ToolMode.NAMED, "weather")):
        options = GenerateOptions(max_tokens=400, temperature=1.0, seed=2)
        messages = [ChatMessage("user", "Is it warm in Paris?")]
        answer = await through_all(mesh, ChatRequest(messages, options, tools=tools, tool_choice=choice))
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].tool_calls
        for name, arguments in answer.choices[0].tool_calls:
            assert name == "weather"
            assert json.loads(arguments)["city"] in {"Paris", "Rome"}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (replace(GREEDY, temperature=-1.0), "temperature"),
        (replace(GREEDY, top_p=1.5), "top_p"),
        (replace(GREEDY, max_tokens=0), "max_tokens"),
        (replace(GREEDY, n=0), "n"),
        (replace(GREEDY, n=1000), "n"),
        (replace(GREEDY, logit_bias={70000: 1.0}), "logit_bias"),
        (replace(GREEDY, logit_bias={1: 101.0}), "logit_bias"),
        (replace(GREEDY, presence_penalty=3.0), "presence_penalty"),
        (replace(GREEDY, min_tokens=99), "min_tokens"),
        (replace(GREEDY, best_of=1, n=2), "best_of"),
        (replace(GREEDY, max_tokens=100000), "max_tokens"),
        (replace(GREEDY, num_logprobs=21), "logprobs"),
        (replace(GREEDY, stop_token_ids=(70000,)), "stop_token_ids"),
        (
            replace(GREEDY, ignore_eos=False, guidance=Guidance(GuidanceKind.JSON_SCHEMA, '{"type": "nonsense"}')),
            "nonsense",
        ),
        (replace(GREEDY, ignore_eos=False, guidance=Guidance(GuidanceKind.REGEX, "(((")), "regex"),
    ],
)
async def test_what_can_never_succeed_is_refused_by_name(front: Front, options: GenerateOptions, field: str) -> None:
    with pytest.raises(RefusedError, match=field):
        await front.generate(GenerateRequest(["refuse"], options))


async def test_one_bad_prompt_refuses_all(mesh: Mesh, front: Front) -> None:
    with pytest.raises(RefusedError):
        await front.generate(GenerateRequest([[1], [2], [70000]], GREEDY))
    await mesh.idle()


async def test_leaving_frees_everything(mesh: Mesh, front: Front) -> None:
    endless = replace(SAMPLED, max_tokens=1800, n=2)
    async with front.first_piece(GenerateRequest(["endless"], endless)):
        assert (await mesh.client.status()).engine.num_running > 0
    await mesh.idle()


async def test_a_deadline_ends_a_request(mesh: Mesh) -> None:
    late = GenerateRequest(["late"], replace(SAMPLED, max_tokens=2000, timeout_s=0.15, n=8))
    with pytest.raises(OrcaError) as missed:
        async for _ in mesh.client.generate(late):
            pass
    assert missed.value.code is StatusCode.DEADLINE_EXCEEDED
    with pytest.raises(openai.APIStatusError) as status:
        await mesh.fronts["http"].generate(late, stream=False)
    assert status.value.status_code in {408, 504}
    with pytest.raises(OrcaError) as missed:
        async for _ in mesh.client.generate(
            replace(late, options=replace(late.options, timeout_s=None)), timeout_s=0.15
        ):
            pass
    assert missed.value.code is StatusCode.DEADLINE_EXCEEDED
    await mesh.idle()


async def test_the_sdk_times_out_and_cancels(mesh: Mesh) -> None:
    with pytest.raises(openai.APITimeoutError):
        await mesh.openai.with_options(timeout=0.2).completions.create(
            model=mesh.model, prompt="late", max_tokens=2000, n=8, extra_body={"ignore_eos": True}
        )
    await mesh.idle()
    task = asyncio.create_task(
        mesh.openai.completions.create(model=mesh.model, prompt="x", max_tokens=2000, extra_body={"ignore_eos": True})
    )
    async with asyncio.timeout(10):
        while not (await mesh.client.status()).engine.num_running:
            pass
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await mesh.idle()


async def test_the_sdk_parses_into_a_model(mesh: Mesh) -> None:
    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=6)
        is_adult: bool

    parsed = await mesh.openai.chat.completions.parse(
        model=mesh.model,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}],
        response_format=Person,
        seed=4,
        max_completion_tokens=200,
    )
    person = parsed.choices[0].message.parsed
    assert person is not None
    assert isinstance(person.is_adult, bool)
    assert parsed.usage is not None
    assert parsed.usage.total_tokens == parsed.usage.prompt_tokens + parsed.usage.completion_tokens


async def test_the_sdk_knows_the_errors(mesh: Mesh) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await mesh.openai.completions.create(model="no-such-model", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await mesh.openai.chat.completions.create(model=mesh.model, messages=[])
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as unknown:
        await mesh.openai.completions.create(model=mesh.model, prompt="x", extra_body={"no_such_field": 1})
    assert "no_such_field" in str(unknown.value)


async def test_usage_is_told_when_asked_for(mesh: Mesh) -> None:
    for include_usage in (None, False, True):
        options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
        stream = await mesh.openai.completions.create(
            model=mesh.model,
            prompt="usage",
            max_tokens=4,
            n=2,
            stream=True,
            extra_body={"ignore_eos": True},
            **options,  # type: ignore[call-overload]
        )
        chunks = [chunk async for chunk in stream]
        with_usage = [chunk for chunk in chunks if chunk.usage is not None]
        if not include_usage:
            assert not with_usage
            continue
        assert with_usage == chunks[-1:]
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 8


async def test_chat_goes_on_with_the_last_message(mesh: Mesh) -> None:
    messages = [ChatMessage("user", "Count."), ChatMessage("assistant", "one, two,")]
    options = replace(GREEDY, max_tokens=6)
    on = await mesh.fronts["grpc"].chat(ChatRequest(messages, options, continue_final_message=True))
    body = {"continue_final_message": True, "add_generation_prompt": False, "ignore_eos": True}
    over_http = await mesh.openai.chat.completions.create(
        model=mesh.model,
        messages=[{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one, two,"}],
        max_tokens=6,
        temperature=0,
        extra_body=body,
    )
    assert over_http.choices[0].message.content == on.choices[0].text
