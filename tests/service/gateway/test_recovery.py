"""What clients see when the engine, the session or the scheduler goes and comes back: a pause."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

import pytest
import structlog

from shared.client import Delta, GenerateOptions
from shared.errors import UnavailableError
from shared.messages import FinishReason, SessionEvents
from tests.fakes.fake_scheduler import ENGINE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.service.gateway.conftest import RunningGateway, StartGateway


async def collect(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize("how", ["session ends", "scheduler dies"])
async def test_unfinished_requests_go_on_in_the_next_session(gateway: RunningGateway, how: str) -> None:
    options = GenerateOptions(max_tokens=6, seed=7)
    begun = gateway.client.generate("ab", options, request_id="begun")
    await anext(begun)
    first = await gateway.session.submitted()
    gateway.session.tokens(first.handle, *b"xy")
    assert (await anext(begun)).text == "xy"
    fresh = asyncio.create_task(collect(gateway.client.generate("c", request_id="fresh")))
    second = await gateway.session.submitted()
    ended = asyncio.create_task(collect(gateway.client.generate("d")))
    third = await gateway.session.submitted()
    gateway.session.end(third.handle, FinishReason.LENGTH, 65)
    await ended

    gateway.scheduler.engine = None  # the next session is told of no engine yet
    if how == "session ends":
        gateway.session.drop()
    else:
        await gateway.scheduler.stop()
        await gateway.scheduler.start()
    session = await gateway.reconnected()
    await gateway.health(serving=False)
    with pytest.raises(UnavailableError, match="not ready"):
        await collect(gateway.client.generate("e"))
    assert session.submits.empty(), "without an engine there is nobody to submit to"

    session.ready()
    again = await session.submitted()
    assert again == dataclasses.replace(first, output_token_ids=again.output_token_ids)
    assert again.output_token_ids.tolist() == list(b"xy")
    assert await session.submitted() == second
    session.tokens(again.handle, *b"z")
    session.end(again.handle, FinishReason.LENGTH, *b"!", queue_ns=1, prefill_ns=2, decode_ns=3)
    session.end(second.handle, FinishReason.LENGTH, *b"C")
    rest = await collect(begun)
    assert text(rest) == "z!"
    finish = rest[-1].finish
    assert finish is not None
    assert finish.num_output_tokens == 4
    assert finish.decode_ms > 3e-6, "the pause counts"
    assert text(await fresh) == "C"
    assert session.submits.empty()
    await gateway.health(serving=True)


async def test_a_request_cancelled_in_the_pause_is_not_submitted_again(gateway: RunningGateway) -> None:
    deltas = gateway.client.generate("a")
    await anext(deltas)
    await gateway.session.submitted()
    gateway.scheduler.engine = None
    gateway.session.drop()
    session = await gateway.reconnected()
    await deltas.aclose()
    while (await gateway.client.status()).num_gateway_requests:
        pass
    session.ready()
    await gateway.health(serving=True)
    other = asyncio.create_task(collect(gateway.client.generate("b", request_id="other")))
    submit = await session.submitted()
    assert submit.request_id == "other"
    assert session.cancels.empty()
    session.end(submit.handle, FinishReason.LENGTH, 65)
    await other


async def test_a_request_whose_end_was_lost_ends(gateway: RunningGateway) -> None:
    length = gateway.client.generate("a", GenerateOptions(max_tokens=2))
    await anext(length)
    submit = await gateway.session.submitted()
    gateway.session.tokens(submit.handle, *b"xy")
    assert (await anext(length)).text == "xy"
    stop = gateway.client.generate("a", GenerateOptions(stop_token_ids=(122,)))
    await anext(stop)
    submit = await gateway.session.submitted()
    gateway.session.tokens(submit.handle, *b"z")
    assert (await anext(stop)) == Delta(token_ids=(122,))
    gateway.session.drop()
    session = await gateway.reconnected()
    for deltas, reason in ((length, FinishReason.LENGTH), (stop, FinishReason.STOP)):
        (last,) = await collect(deltas)
        assert last.finish is not None
        assert last.finish.reason is reason
    assert session.submits.empty()


async def test_another_model_ends_the_requests_of_the_old_one(gateway: RunningGateway) -> None:
    deltas = gateway.client.generate("a")
    await anext(deltas)
    gateway.scheduler.engine = dataclasses.replace(ENGINE, model="random:tiny-llama")
    gateway.session.drop()
    await gateway.reconnected()
    with pytest.raises(UnavailableError, match=r"now serves 'random:tiny-llama', no longer 'synthetic:'"):
        await anext(deltas)
    await gateway.health(serving=True)
    assert (await gateway.client.model_info()).engine.model == "random:tiny-llama"


async def test_a_lost_engine_pauses_requests_without_submitting_them_again(gateway: RunningGateway) -> None:
    deltas = gateway.client.generate("a")
    await anext(deltas)
    submit = await gateway.session.submitted()
    gateway.session.lost()
    await gateway.health(serving=False)
    with pytest.raises(UnavailableError, match="the engine lost a worker and is recovering"):
        await collect(gateway.client.generate("b"))
    gateway.session.ready()
    await gateway.health(serving=True)
    gateway.session.end(submit.handle, FinishReason.LENGTH, *b"x")
    assert text(await collect(deltas)) == "x"
    assert gateway.session.submits.empty()


async def test_events_of_another_version_end_the_session(gateway: RunningGateway) -> None:
    gateway.session.send(SessionEvents(token_handles=[], token_ids=[1]))
    await gateway.reconnected()
    await gateway.health(serving=True)


async def test_each_change_of_the_scheduler_is_logged_once(start_gateway: StartGateway) -> None:
    with structlog.testing.capture_logs() as logs:
        async with start_gateway() as gateway:
            await gateway.health(serving=True)
            await gateway.scheduler.stop()
            await gateway.health(serving=False)
            status = await gateway.client.status()
            assert not status.engine.ready
            assert "does not answer" in status.engine.reason
            await gateway.scheduler.start()
            await gateway.reconnected()
            await gateway.health(serving=True)
    events = [entry["event"] for entry in logs]
    assert events[:3] == ["service_listening", "scheduler_connected", "service_ready"]
    assert sorted(events[3:5]) == ["scheduler_lost", "service_not_ready"]
    assert events[5:7] == ["scheduler_connected", "service_ready"]


async def test_a_scheduler_that_hangs_has_lost_its_session_and_is_named(start_gateway: StartGateway) -> None:
    async with start_gateway(heartbeat_s=0.2) as gateway:
        await gateway.health(serving=True)
        asked = asyncio.create_task(collect(gateway.client.generate("a", GenerateOptions(max_tokens=2))))
        first = await gateway.session.submitted()
        gateway.session.tokens(first.handle, 65)
        gateway.scheduler.is_silent = True
        await gateway.health(serving=False)
        with pytest.raises(
            UnavailableError, match=r"the scheduler cannot be reached \(it has not answered for 0.2 s\)"
        ):
            await collect(gateway.client.generate("a"))
        gateway.scheduler.is_silent = False
        session = await gateway.reconnected()
        again = await session.submitted()
        assert list(again.output_token_ids) in ([], [65])
        session.end(again.handle, FinishReason.LENGTH, *[65] * (2 - len(again.output_token_ids)))
        assert sum(len(delta.token_ids) for delta in await asked) == 2


async def test_what_the_scheduler_says_is_missing_is_told(start_gateway: StartGateway) -> None:
    async with start_gateway(heartbeat_s=0.2) as gateway:
        await gateway.health(serving=True)
        gateway.scheduler.status = dataclasses.replace(
            gateway.scheduler.status, ready=False, reason="stage 1 has other plans"
        )
        gateway.session.lost()
        await gateway.health(serving=False)
        async with asyncio.timeout(10):
            while True:
                with pytest.raises(UnavailableError) as refusal:
                    await collect(gateway.client.generate("a"))
                if "not ready: stage 1 has other plans; try again" in str(refusal.value):
                    break
