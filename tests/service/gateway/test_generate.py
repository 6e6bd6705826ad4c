"""Streaming: deltas, ends, cancellation, deadlines, slow clients."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc import aio

from shared.client import ChatMessage, Delta, GenerateOptions, GenerateRequest
from shared.completion import collect_async
from shared.errors import InvalidRequestError, ModelError, OrcaError, OverloadedError, UnavailableError
from shared.generation import Usage
from shared.ids import Handle
from shared.messages import FinishReason
from shared.pb import gateway_pb2, gateway_pb2_grpc
from shared.rpc import REQUEST_ID_KEY, connect
from shared.status import StatusCode
from tests.fakes.fake_scheduler import ENGINE, FakeScheduler
from tests.fakes.forced_tokens import forced

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.service.gateway.conftest import RunningGateway, StartGateway

BOS, EOS = 257, 256
PROMPT = gateway_pb2.Prompt(text="a")


async def collect(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


async def test_a_prompt_is_submitted_and_its_tokens_stream_back(gateway: RunningGateway) -> None:
    options = GenerateOptions(max_tokens=5, temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=2**64 - 1)
    deltas = gateway.client.generate("ab", options, request_id="mine")
    first = await anext(deltas)
    submit = await gateway.session.submitted()
    assert first == Delta(request_id="mine")
    assert submit.request_id == "mine"
    assert submit.prompt_token_ids.tolist() == [BOS, *b"ab"]
    assert submit.output_token_ids.tolist() == []
    assert submit.max_tokens == 5
    assert submit.stop_token_ids == {EOS}
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.25, 0.125)
    assert sampling.seed == 2**64 - 1

    gateway.session.tokens(submit.handle, *b"H")
    assert await anext(deltas) == Delta(text="H", token_ids=(72,))
    gateway.session.tokens(submit.handle, 0xC3)
    gateway.session.tokens(submit.handle, 0xA9)
    assert await anext(deltas) == Delta(text="é", token_ids=(0xC3, 0xA9)), "tokens come with the text they make"
    gateway.session.end(submit.handle, FinishReason.STOP, EOS, queue_ns=10**6, prefill_ns=2 * 10**6, decode_ns=3)
    (last,) = await collect(deltas)
    assert (last.text, last.token_ids) == ("", (EOS,))
    assert last.finish is not None
    assert last.finish.reason is FinishReason.STOP
    assert last.finish.num_output_tokens == 4
    assert last.usage == Usage(num_prompt_tokens=3, num_output_tokens=4)
    assert last.finish.queue_ms >= 1.0, "the time in the gateway counts, too"
    assert (last.finish.prefill_ms, last.finish.decode_ms) == (2.0, 3e-6)


async def test_the_first_delta_has_the_prompts_where_asked_for(gateway: RunningGateway) -> None:
    prompts: list[str | list[int]] = ["ab", [5, 6, 7]]
    options = GenerateOptions(max_tokens=1, n=2)
    request = GenerateRequest(prompts, options, return_prompt_token_ids=True)
    async with forced(gateway.session, lambda _: b"x"):
        first, *rest = await collect(gateway.client.generate(request, request_id="mine"))
        completion = await collect_async(gateway.client.generate(request))
        unasked = await collect_async(gateway.client.generate(GenerateRequest(prompts, options)))
    assert first == Delta(request_id="mine", prompt_token_ids=((BOS, *b"ab"), (5, 6, 7)))
    assert not any(delta.prompt_token_ids for delta in rest)
    assert completion.prompt_token_ids == first.prompt_token_ids
    assert unasked.prompt_token_ids == ()


async def test_length_ends_with_the_last_token_and_an_unfinished_character(gateway: RunningGateway) -> None:
    deltas = asyncio.create_task(collect(gateway.client.generate([1, 2], GenerateOptions(max_tokens=1))))
    submit = await gateway.session.submitted()
    assert submit.prompt_token_ids.tolist() == [1, 2]
    assert len(submit.request_id) == 32
    gateway.session.end(submit.handle, FinishReason.LENGTH, 0xC3)
    first, last = await deltas
    assert first.request_id == submit.request_id
    assert (last.text, last.token_ids) == ("\ufffd", (0xC3,))
    assert last.finish is not None
    assert last.finish.reason is FinishReason.LENGTH


async def test_own_stop_ids_and_ignored_eos(gateway: RunningGateway) -> None:
    options = GenerateOptions(max_tokens=4, stop_token_ids=(120,), ignore_eos=True)
    deltas = asyncio.create_task(collect(gateway.client.generate("a", options)))
    submit = await gateway.session.submitted()
    assert submit.stop_token_ids == {120}
    gateway.session.end(submit.handle, FinishReason.STOP, EOS, 65, 120)
    *_, last = await deltas
    assert (last.text, last.token_ids) == ("A", (EOS, 65, 120)), "the stop token is an id, not text"


async def test_seeds_differ_unless_given(gateway: RunningGateway) -> None:
    async with contextlib.AsyncExitStack() as stack:
        seeds = []
        for _ in range(2):
            deltas = await stack.enter_async_context(contextlib.aclosing(gateway.client.generate("a")))
            await anext(deltas)
            submit = await gateway.session.submitted()
            seeds.append(submit.sampling.seed)
            assert submit.max_tokens == 16
    assert seeds[0] != seeds[1]


async def test_two_requests_interleave(gateway: RunningGateway) -> None:
    one = asyncio.create_task(collect(gateway.client.generate("a", request_id="one")))
    first = await gateway.session.submitted()
    two = asyncio.create_task(collect(gateway.client.generate("b", request_id="one")))
    second = await gateway.session.submitted()
    assert first.handle != second.handle, "names may repeat, handles do not"
    session = gateway.session
    for char in "xyz":
        session.tokens(first.handle, ord(char))
        session.tokens(second.handle, ord(char.upper()))
    session.tokens(Handle(999), 1)  # a handle that nobody knows
    session.end(second.handle, FinishReason.LENGTH)
    session.end(first.handle, FinishReason.LENGTH)
    assert "".join(delta.text for delta in await one) == "xyz"
    assert "".join(delta.text for delta in await two) == "XYZ"


async def test_chat_goes_through_the_template_and_takes_the_rest_of_the_capacity(gateway: RunningGateway) -> None:
    deltas = asyncio.create_task(collect(gateway.client.chat([ChatMessage("user", "hi")])))
    submit = await gateway.session.submitted()
    bos, *text = submit.prompt_token_ids.tolist()
    assert (bos, bytes(text).decode()) == (BOS, "user: hi\nassistant: ")
    assert submit.max_tokens == ENGINE.num_slots - len(submit.prompt_token_ids)
    gateway.session.end(submit.handle, FinishReason.STOP, *b"yo", EOS)
    assert "".join(delta.text for delta in await deltas) == "yo"


async def test_the_metadata_names_a_request(gateway: RunningGateway) -> None:
    async with connect(gateway.address) as channel:
        call = gateway_pb2_grpc.GatewayStub(channel).Generate(
            gateway_pb2.GenerateRequest(prompts=[PROMPT]), metadata=[(REQUEST_ID_KEY, "from-metadata")]
        )
        message = await call.read()
        assert isinstance(message, gateway_pb2.GenerateResponse)
        assert message.request_id == "from-metadata"
        call.cancel()


async def test_closing_the_iterator_cancels_at_the_scheduler(gateway: RunningGateway) -> None:
    deltas = gateway.client.generate("a")
    await anext(deltas)
    submit = await gateway.session.submitted()
    await deltas.aclose()
    assert await gateway.session.cancelled() == submit.handle
    assert (await gateway.client.status()).num_gateway_requests == 0


async def test_dropping_the_iterator_cancels_at_the_scheduler(gateway: RunningGateway) -> None:
    async for _ in gateway.client.generate("a"):
        break
    submit = await gateway.session.submitted()
    assert await gateway.session.cancelled() == submit.handle


async def test_a_client_that_vanishes_cancels_at_the_scheduler(gateway: RunningGateway) -> None:
    channel = connect(gateway.address)
    call = gateway_pb2_grpc.GatewayStub(channel).Generate(gateway_pb2.GenerateRequest(prompts=[PROMPT]))
    await call.read()
    submit = await gateway.session.submitted()
    await channel.close()
    assert await gateway.session.cancelled() == submit.handle


async def test_a_deadline_cancels_at_the_scheduler(gateway: RunningGateway) -> None:
    with pytest.raises(OrcaError) as caught:
        await collect(gateway.client.generate("a", timeout_s=0.3))
    assert caught.value.code is StatusCode.DEADLINE_EXCEEDED
    submit = await gateway.session.submitted()
    assert await gateway.session.cancelled() == submit.handle


async def test_an_ended_request_is_not_cancelled(gateway: RunningGateway) -> None:
    for _ in range(2):
        deltas = asyncio.create_task(collect(gateway.client.generate("a")))
        submit = await gateway.session.submitted()
        gateway.session.end(submit.handle, FinishReason.LENGTH, 65)
        await deltas
    assert gateway.session.cancels.empty()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (StatusCode.INVALID_ARGUMENT, InvalidRequestError),
        (StatusCode.RESOURCE_EXHAUSTED, OverloadedError),
        (StatusCode.UNAVAILABLE, UnavailableError),
        (StatusCode.FAILED_PRECONDITION, ModelError),
        (StatusCode.DATA_LOSS, OrcaError),
    ],
)
async def test_a_failed_request_ends_with_the_schedulers_status(
    gateway: RunningGateway, code: StatusCode, kind: type[OrcaError]
) -> None:
    deltas = gateway.client.generate("a")
    await anext(deltas)
    submit = await gateway.session.submitted()
    gateway.session.end(submit.handle, FinishReason.ERROR, error_code=code, error_message="it broke")
    with pytest.raises(kind, match="it broke") as caught:
        await anext(deltas)
    assert caught.value.code is code
    assert gateway.session.cancels.empty()


async def test_cancelled_by_the_scheduler_is_a_status(gateway: RunningGateway) -> None:
    deltas = gateway.client.generate("a")
    await anext(deltas)
    submit = await gateway.session.submitted()
    gateway.session.end(submit.handle, FinishReason.CANCELLED)
    with pytest.raises(OrcaError) as caught:
        await anext(deltas)
    assert caught.value.code is StatusCode.CANCELLED


async def test_tokens_merge_while_the_client_is_slow(start_gateway: StartGateway) -> None:
    num_messages, num_tokens_each = 1000, 200
    num_tokens = num_messages * num_tokens_each
    engine = dataclasses.replace(ENGINE, max_model_len=2 * num_tokens, num_slots=2 * num_tokens)
    async with start_gateway(scheduler=FakeScheduler(engine=engine)) as gateway:
        await gateway.health(serving=True)
        # Without probing for bandwidth the window of the stream stays at 64 KiB.
        async with aio.insecure_channel(gateway.address, options=[("grpc.http2.bdp_probe", 0)]) as channel:
            options = gateway_pb2.GenerationOptions(max_tokens=num_tokens)
            call = gateway_pb2_grpc.GatewayStub(channel).Generate(
                gateway_pb2.GenerateRequest(prompts=[PROMPT], options=options)
            )
            await call.read()
            submit = await gateway.session.submitted()
            for index in range(num_messages):
                gateway.session.tokens(submit.handle, *[97 + index % 26] * num_tokens_each)
            gateway.session.end(submit.handle, FinishReason.LENGTH)
            # A second request goes from end to end behind all of these, while the first client does not read.
            await (await serve_another(gateway))
            messages: list[gateway_pb2.GenerateResponse] = []
            while isinstance(message := await call.read(), gateway_pb2.GenerateResponse):
                messages.append(message)
    tokens = [token for message in messages for token in message.token_ids]
    assert tokens == [97 + index % 26 for index in range(num_messages) for _ in range(num_tokens_each)]
    assert len(messages) < num_messages / 2
    assert messages[-1].usage.num_output_tokens == num_tokens


async def test_cancelling_a_stalled_stream_cancels_at_the_scheduler(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        await gateway.health(serving=True)
        async with connect(gateway.address) as channel:
            call = gateway_pb2_grpc.GatewayStub(channel).Generate(
                gateway_pb2.GenerateRequest(prompts=[PROMPT]), metadata=[(REQUEST_ID_KEY, "stalled")]
            )
            await call.read()
            submit = await gateway.session.submitted()
            gateway.session.tokens(submit.handle, *[97] * 400_000)
            await (await serve_another(gateway))
            call.cancel()
            assert await gateway.session.cancelled() == submit.handle


async def serve_another(gateway: RunningGateway) -> asyncio.Task[list[Delta]]:
    other = asyncio.create_task(collect(gateway.client.generate("b")))
    submit = await gateway.session.submitted()
    gateway.session.end(submit.handle, FinishReason.LENGTH, 65)
    return other


async def test_overload_is_refused_with_a_hint(start_gateway: StartGateway) -> None:
    async with start_gateway(max_requests=2) as gateway:
        await gateway.health(serving=True)
        running = [gateway.client.generate("a") for _ in range(2)]
        for deltas in running:
            await anext(deltas)
        with pytest.raises(OverloadedError, match=r"serves 2 requests.*try again later"):
            await collect(gateway.client.generate("a"))
        with pytest.raises(OverloadedError):
            await gateway.client.tokenize("a")
        async with connect(gateway.address) as channel:
            call = gateway_pb2_grpc.GatewayStub(channel).Generate(gateway_pb2.GenerateRequest(prompts=[PROMPT]))
            with pytest.raises(aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert ("retry-after-ms", "1000") in tuple(await call.trailing_metadata())
        await running[0].aclose()
        await gateway.session.cancelled()
        deltas = gateway.client.generate("a")
        assert (await anext(deltas)).request_id
        await deltas.aclose()
        await running[1].aclose()
