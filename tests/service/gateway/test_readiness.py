"""When a gateway serves, what it says when it does not, and how it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING

import pytest
import structlog
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.gateway.app import run_gateway
from services.gateway.served_model import load_model_text
from shared.client import Delta, GatewayClient, GenerateOptions
from shared.config import GatewayConfig, ListenConfig
from shared.errors import ConfigError, ModelError, UnavailableError
from shared.lifecycle import Shutdown
from shared.messages import EngineStatus, FinishReason
from shared.rpc import connect
from tests.fakes.fake_scheduler import ENGINE, FakeScheduler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.gateway.served_model import ModelText
    from tests.service.gateway.conftest import RunningGateway, StartGateway


async def collect(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


async def test_without_an_engine_it_says_so(start_gateway: StartGateway) -> None:
    async with start_gateway(scheduler=FakeScheduler(engine=None)) as gateway:
        await gateway.health(serving=False)
        with pytest.raises(UnavailableError, match=r"not ready: .*scheduler.*try again in a moment"):
            await collect(gateway.client.generate("a"))
        with pytest.raises(UnavailableError, match="not ready"):
            await gateway.client.tokenize("a")
        with pytest.raises(UnavailableError, match="not ready"):
            await gateway.client.model_info()
        gateway.session.ready()
        await gateway.health(serving=True)


async def test_without_a_scheduler_it_says_so(unused_port: int) -> None:
    config = GatewayConfig(scheduler=f"127.0.0.1:{unused_port}", listen=ListenConfig(port=0))
    shutdown = Shutdown(0)
    with structlog.testing.capture_logs() as logs:
        task = asyncio.create_task(run_gateway(config, shutdown))
        while not any(entry["event"] == "scheduler_lost" for entry in logs):
            await asyncio.wait([task], timeout=0.01)
        address = next(entry["address"] for entry in logs if entry["event"] == "service_listening")
        async with GatewayClient(address) as client:
            with pytest.raises(UnavailableError, match="the scheduler cannot be reached"):
                await collect(client.generate("a"))
            status = await client.status()
        shutdown.request("done")
        await task
    assert not status.engine.ready
    assert f"the scheduler at 127.0.0.1:{unused_port} does not answer" in status.engine.reason
    assert "scheduler_connected" not in {entry["event"] for entry in logs}


async def test_requests_wait_for_the_tokenizer_which_is_loaded_once(start_gateway: StartGateway) -> None:
    gate = threading.Event()
    names = []

    def load(name: str) -> ModelText:
        names.append(name)
        assert gate.wait(10)
        return load_model_text(name)

    async with start_gateway(load=load) as gateway:
        while True:
            with pytest.raises(UnavailableError, match="not ready") as caught:
                await collect(gateway.client.generate("a"))
            if "the tokenizer of 'synthetic:' is being loaded" in str(caught.value):
                break
        status = (await gateway.client.status()).engine
        assert (status.ready, status.num_running) == (False, 3)
        assert "being loaded" in status.reason
        gate.set()
        await gateway.health(serving=True)
        assert (await gateway.client.status()).engine == gateway.scheduler.status
        gateway.session.lost()
        gateway.session.ready(dataclasses.replace(ENGINE, num_slots=32))
        async with asyncio.timeout(10):
            num_slots = 0
            while num_slots != 32:
                with contextlib.suppress(UnavailableError):  # between the two, there is no engine
                    num_slots = (await gateway.client.model_info()).engine.num_slots
        gateway.session.drop()
        await gateway.reconnected()
        await gateway.health(serving=True)
    assert names == ["synthetic:"]


async def test_a_model_that_is_not_here_ends_the_service_with_what_to_do(start_gateway: StartGateway) -> None:
    engine = dataclasses.replace(ENGINE, model="no-such-model")
    with pytest.RaisesGroup(pytest.RaisesExc(ModelError, match=r"this gateway's host lacks .*'no-such-model'")):
        async with start_gateway(scheduler=FakeScheduler(engine=engine)) as gateway:
            await gateway.task


async def test_model_info_and_tokenize(gateway: RunningGateway) -> None:
    info = await gateway.client.model_info()
    assert info.engine == ENGINE
    assert info.eos_token_ids == (256,)
    assert info.has_chat_template
    assert await gateway.client.tokenize("hé") == [257, 104, 0xC3, 0xA9]
    assert await gateway.client.tokenize("h", add_special_tokens=False) == [104]
    assert await gateway.client.tokenize("", add_special_tokens=False) == []


async def test_status_counts_the_gateways_requests(gateway: RunningGateway) -> None:
    gateway.scheduler.status = EngineStatus(ready=False, reason="loading", epoch=4, info=None, workers=())
    deltas = gateway.client.generate("a")
    await anext(deltas)
    status = await gateway.client.status()
    assert status.num_gateway_requests == 1
    assert status.engine == gateway.scheduler.status
    await deltas.aclose()


async def test_reflection_lists_the_service(gateway: RunningGateway) -> None:
    async with connect(gateway.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        await call.done_writing()
    names = {service.name for service in answer.list_services_response.service}
    assert {"orca.v1.Gateway", "grpc.health.v1.Health"} <= names


async def test_draining_lets_requests_end_and_takes_no_more(start_gateway: StartGateway) -> None:
    async with start_gateway(grace_s=10) as gateway:
        await gateway.health(serving=True)
        deltas = gateway.client.generate("a")
        await anext(deltas)
        submit = await gateway.session.submitted()
        gateway.shutdown.request("SIGTERM")
        await gateway.health(serving=False)
        with pytest.raises(UnavailableError, match="the gateway is shutting down"):
            await collect(gateway.client.generate("b"))
        gateway.session.end(submit.handle, FinishReason.LENGTH, *b"x")
        (last,) = await collect(deltas)
        assert (last.text, last.finish is not None) == ("x", True)
        await asyncio.wait_for(gateway.task, 5)


async def test_what_outlasts_the_grace_time_ends_with_an_error(start_gateway: StartGateway) -> None:
    async with start_gateway(grace_s=0) as gateway:
        await gateway.health(serving=True)
        deltas = gateway.client.generate("a")
        await anext(deltas)
        await gateway.session.submitted()
        gateway.shutdown.request("SIGTERM")
        with pytest.raises(UnavailableError, match="the gateway is shutting down"):
            await collect(deltas)
        await asyncio.wait_for(gateway.task, 5)


async def test_a_taken_port_is_a_configuration_error(gateway: RunningGateway) -> None:
    port = int(gateway.address.rpartition(":")[2])
    config = GatewayConfig(scheduler=gateway.scheduler.address, listen=ListenConfig(port=port))
    with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}"):
        await run_gateway(config, Shutdown(0))


async def test_a_closed_client_says_so(gateway: RunningGateway) -> None:
    client = GatewayClient(gateway.address)
    await client.close()
    with pytest.raises(UnavailableError, match="this client is closed"):
        await client.status()
    with pytest.raises(UnavailableError, match="this client is closed"):
        await collect(client.generate("a", GenerateOptions()))
