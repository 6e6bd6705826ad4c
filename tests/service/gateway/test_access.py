"""Who gets in, whose turn it is, and what is told to whom has to wait."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc import aio
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shared.client import Delta, GatewayClient, GenerateOptions
from shared.errors import InvalidRequestError, OverloadedError, UnauthenticatedError, UnavailableError
from shared.messages import FinishReason
from shared.rpc import connect
from shared.tls import TlsFiles, TlsRole
from tests.certificates import Authority

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from tests.service.gateway.conftest import RunningGateway, StartGateway  # only for the type checker

ALICE = "alice-secret-0123456789"
BOB = "bob-secret-0123456789"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"alice {ALICE} weight=3\nbob {BOB} max_requests=2\n")
    return file


async def collect(deltas: AsyncGenerator[Delta, None]) -> list[Delta]:
    async with contextlib.aclosing(deltas):
        return [delta async for delta in deltas]


async def serve_next(gateway: RunningGateway) -> str:
    """End the next request that reaches the scheduler; its name."""
    submit = await gateway.session.submitted()
    gateway.session.end(submit.handle, FinishReason.LENGTH, 65)
    return str(submit.request_id)


async def test_only_known_keys_are_served(start_gateway: StartGateway, keys: Path) -> None:
    async with start_gateway(api_keys=str(keys), api_key=ALICE) as gateway:
        await gateway.health(serving=True)
        assert (await gateway.client.model_info()).engine.model == "synthetic:"
        serving = asyncio.create_task(serve_next(gateway))
        assert (await collect(gateway.client.generate("a")))[-1].finish is not None
        await serving
        for key in (None, "wrong", ALICE + "x", BOB[:-1]):
            async with GatewayClient(gateway.address, api_key=key) as client:
                for call in (client.model_info(), client.status(), client.tokenize("a"), collect(client.generate("a"))):
                    with pytest.raises(UnauthenticatedError):
                        await call
        assert gateway.session.submits.empty()


async def test_reflection_needs_a_key_and_health_does_not(start_gateway: StartGateway, keys: Path) -> None:
    async with start_gateway(api_keys=str(keys)) as gateway:
        await gateway.health(serving=True)
        async with connect(gateway.address) as channel:
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            )
            with pytest.raises(aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_changed_file_counts_without_a_restart(start_gateway: StartGateway, keys: Path) -> None:
    async with start_gateway(api_keys=str(keys), api_key=BOB) as gateway:
        await gateway.health(serving=True)
        await gateway.client.model_info()
        await asyncio.to_thread(keys.write_text, f"alice {ALICE}\n")
        with contextlib.suppress(UnauthenticatedError):
            async with asyncio.timeout(10):
                while True:
                    await gateway.client.model_info()
        async with GatewayClient(gateway.address, api_key=ALICE) as client:
            await client.model_info()


async def test_nobody_waits_behind_the_flood_of_another(start_gateway: StartGateway, keys: Path) -> None:
    async with (
        start_gateway(api_keys=str(keys), api_key=ALICE, max_requests=1, max_queued=100) as gateway,
        GatewayClient(gateway.address, api_key=BOB) as bob,
    ):
        await gateway.health(serving=True)
        flood = [
            asyncio.create_task(collect(gateway.client.generate("a", request_id=f"alice {at}"))) for at in range(20)
        ]
        first = await gateway.session.submitted()
        while (await gateway.client.status()).num_gateway_requests < len(flood):
            pass
        late = asyncio.create_task(collect(bob.generate("b", request_id="bob")))
        while (await gateway.client.status()).num_gateway_requests <= len(flood):
            pass
        gateway.session.end(first.handle, FinishReason.LENGTH, 65)
        order = [await serve_next(gateway) for _ in range(20)]
        assert "bob" in order[:4], "three of alice's for one of bob's, not twenty"
        await asyncio.gather(late, *flood)


async def test_a_key_has_its_own_limit(start_gateway: StartGateway, keys: Path) -> None:
    async with start_gateway(api_keys=str(keys), api_key=BOB, max_queued=8) as gateway:
        await gateway.health(serving=True)
        requests = [asyncio.create_task(collect(gateway.client.generate("b"))) for _ in range(3)]
        submits = [await gateway.session.submitted() for _ in range(2)]
        while (await gateway.client.status()).num_gateway_requests < len(requests):
            pass
        assert gateway.session.submits.empty()
        gateway.session.end(submits[0].handle, FinishReason.LENGTH, 65)
        submits.append(await gateway.session.submitted())
        for submit in submits[1:]:
            gateway.session.end(submit.handle, FinishReason.LENGTH, 65)
        await asyncio.gather(*requests)


async def test_the_surplus_of_a_burst_is_refused_at_once_and_the_rest_is_served(start_gateway: StartGateway) -> None:
    async with start_gateway(max_requests=8, max_queued=16) as gateway:
        await gateway.health(serving=True)
        num_choices = [4 if at % 10 == 0 else 1 for at in range(200)]
        requests = [
            asyncio.create_task(collect(gateway.client.generate("a", GenerateOptions(n=n)))) for n in num_choices
        ]
        places = dict(zip(requests, num_choices, strict=True))
        waiting = set(requests)
        async with asyncio.timeout(10):
            # Nobody is served yet: once the gateway has as many as are not done, all others are refused.
            while (await gateway.client.status()).num_gateway_requests != len(waiting):
                waiting = {request for request in requests if not request.done()}
        assert 8 + 16 - 3 <= sum(places[request] for request in waiting) <= 8 + 16
        for request in set(requests) - waiting:
            refused = request.exception()
            assert isinstance(refused, OverloadedError)
            assert refused.retry_after_s is not None
            assert refused.retry_after_s >= 1
        with pytest.raises(InvalidRequestError, match="has 5000000 bytes"):
            await collect(gateway.client.generate("x" * 5_000_000))
        for _ in range(sum(places[request] for request in waiting)):
            await serve_next(gateway)
        assert all(await asyncio.gather(*waiting))


async def test_who_gives_up_while_it_waits_never_reaches_the_scheduler(start_gateway: StartGateway) -> None:
    async with start_gateway(max_requests=1, max_queued=4) as gateway:
        await gateway.health(serving=True)
        first = asyncio.create_task(collect(gateway.client.generate("a")))
        submit = await gateway.session.submitted()
        with pytest.raises(Exception, match=r"[Dd]eadline"):
            await collect(gateway.client.generate("b", timeout_s=0.1))
        async with asyncio.timeout(10):
            while (await gateway.client.status()).num_gateway_requests > 1:
                pass
        gateway.session.end(submit.handle, FinishReason.LENGTH, 65)
        await first
        assert gateway.session.submits.empty()
        assert gateway.session.cancels.empty()


async def test_tls_on_both_sides_of_the_gateway(start_gateway: StartGateway, tmp_path: Path) -> None:
    public, strangers = Authority(tmp_path, "public"), Authority(tmp_path, "strangers")
    pair, own, strange = public.pair(), public.pair("client"), strangers.pair("client")
    tls = TlsFiles(pair.certificate, pair.private_key, public.file, TlsRole.PUBLIC)
    client_tls = TlsFiles(own.certificate, own.private_key, public.file).load()
    async with start_gateway(client_tls=client_tls, tls=tls) as gateway:
        await gateway.health(serving=True)
        options = GenerateOptions(max_tokens=1)
        serving = asyncio.create_task(serve_next(gateway))
        assert await collect(gateway.client.generate("a", options))
        await serving
        for other in (
            None,
            TlsFiles(authorities=public.file).load(),
            TlsFiles(authorities=strangers.file).load(),
            TlsFiles(strange.certificate, strange.private_key, public.file).load(),
        ):
            async with GatewayClient(gateway.address, tls=other) as client:
                with pytest.raises(UnavailableError):
                    await client.model_info()
