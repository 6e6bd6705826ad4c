"""A request is nowhere beyond its deadline: not in queue, tokenizer or engine, nor behind a stalled client."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from grpc import aio
from structlog.testing import capture_logs

from services.gateway.served_model import load_model_text
from shared.client import Delta, GenerateOptions
from shared.errors import DeadlineExceededError
from shared.messages import FinishReason
from shared.pb import gateway_pb2, gateway_pb2_grpc
from shared.text.byte_tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from services.gateway.served_model import ModelText
    from tests.service.gateway.conftest import RunningGateway, StartGateway

BRIEF = GenerateOptions(timeout_s=0.1)


async def collect(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


async def nobody_is_served(gateway: RunningGateway) -> None:
    async with asyncio.timeout(10):
        while (await gateway.client.status()).num_gateway_requests:
            pass


async def test_in_the_queue(start_gateway: StartGateway) -> None:
    async with start_gateway(max_requests=1, max_queued=4) as gateway:
        await gateway.health(serving=True)
        running = gateway.client.generate("a", GenerateOptions(max_tokens=1))
        await anext(running)
        first = await gateway.session.submitted()
        with pytest.raises(DeadlineExceededError, match=r"its 0.1 s \(timeout_s\) while it waited for a place"):
            await collect(gateway.client.generate("b", BRIEF))
        with pytest.raises(DeadlineExceededError):
            await collect(gateway.client.generate("b", timeout_s=0.1))
        gateway.session.end(first.handle, FinishReason.LENGTH, 97)
        await collect(running)
        await nobody_is_served(gateway)
        assert gateway.session.submits.empty()


async def test_in_the_tokenizer(start_gateway: StartGateway) -> None:
    gate = threading.Event()

    class Slow(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
            assert gate.wait(10)
            return super().encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special)

    def load(name: str) -> ModelText:
        text = load_model_text(name)
        return type(text)(Slow(300), text.chat_templates)

    async with start_gateway(load=load) as gateway:
        await gateway.health(serving=True)
        try:
            with pytest.raises(DeadlineExceededError, match="while it waited for its prompt to be tokenized"):
                await collect(gateway.client.generate("b", BRIEF))
            await nobody_is_served(gateway)
        finally:
            gate.set()
        assert gateway.session.submits.empty()


async def test_in_the_engine(gateway: RunningGateway) -> None:
    deltas = gateway.client.generate("a", GenerateOptions(timeout_s=0.3, n=2))
    await anext(deltas)
    submits = [await gateway.session.submitted() for _ in range(2)]
    gateway.session.tokens(submits[0].handle, *b"xyz")
    assert (await anext(deltas)).text == "xyz"
    with pytest.raises(DeadlineExceededError, match=r"within its 0.3 s \(timeout_s\); 3 tokens of output were there"):
        await anext(deltas)
    assert [await gateway.session.cancelled() for _ in range(2)] == [submit.handle for submit in submits]
    await nobody_is_served(gateway)


async def test_that_of_the_call_is_told_from_leaving(start_gateway: StartGateway) -> None:
    with capture_logs() as logs:
        async with start_gateway(max_requests=1, max_queued=4) as gateway:
            await gateway.health(serving=True)

            async def end_of(request_id: str) -> Mapping[str, Any]:
                async with asyncio.timeout(10):
                    while not (found := [entry for entry in logs if entry.get("request_id") == request_id]):
                        await gateway.client.status()
                return found[0]

            running = gateway.client.generate("a", request_id="running", timeout_s=1.234)
            await anext(running)
            submit = await gateway.session.submitted()
            with pytest.raises(DeadlineExceededError):
                await collect(gateway.client.generate("b", request_id="queued", timeout_s=0.2))
            assert (await end_of("queued"))["code"] == "DEADLINE_EXCEEDED"
            # What is over first counts.
            with pytest.raises(DeadlineExceededError, match=r"0.1 s \(timeout_s\)"):
                await collect(gateway.client.generate("b", BRIEF, timeout_s=60))
            gateway.session.tokens(submit.handle, *b"x")
            with pytest.raises(DeadlineExceededError):
                await collect(running)
            assert await gateway.session.cancelled() == submit.handle
            ended = await end_of("running")
            assert (ended["code"], ended["num_output_tokens"]) == ("DEADLINE_EXCEEDED", 1)
            left = gateway.client.generate("a", request_id="left", timeout_s=60)
            await anext(left)
            await left.aclose()
            assert (await end_of("left"))["code"] == "CANCELLED"
    assert "error" not in {entry["log_level"] for entry in logs}, "nothing is wrong with a call that is over"


async def test_one_that_ends_in_time_does_not_notice(gateway: RunningGateway) -> None:
    deltas = gateway.client.generate("a", GenerateOptions(timeout_s=60))
    await anext(deltas)
    submit = await gateway.session.submitted()
    gateway.session.end(submit.handle, FinishReason.LENGTH, *b"x")
    assert [delta.text for delta in await collect(deltas)] == ["x"]
    assert gateway.session.cancels.empty()


async def test_behind_a_client_that_does_not_read(gateway: RunningGateway) -> None:
    # Without probing for bandwidth the window of the stream stays at 64 KiB.
    async with aio.insecure_channel(gateway.address, options=[("grpc.http2.bdp_probe", 0)]) as channel:
        options = gateway_pb2.GenerationOptions(timeout_s=0.5, max_tokens=40)
        call = gateway_pb2_grpc.GatewayStub(channel).Generate(
            gateway_pb2.GenerateRequest(prompts=[gateway_pb2.Prompt(text="a")], options=options)
        )
        await call.read()
        submit = await gateway.session.submitted()
        for _ in range(1000):
            gateway.session.tokens(submit.handle, *[97] * 200)
        assert await gateway.session.cancelled() == submit.handle, "the engine is free at once"
        began = time.monotonic()
        await nobody_is_served(gateway)
        assert time.monotonic() - began > 0.5, "it has the time to read that its time is over"
        call.cancel()
