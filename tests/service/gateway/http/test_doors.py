"""Who may come in: API keys on every address however it is written, other origins, TLS."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

import httpx2
import pytest

from services.gateway.api_keys import Authenticator
from services.gateway.clients import ANONYMOUS, Client, calling_client
from services.gateway.http.authentication import OPEN_PATHS
from shared.config import HttpConfig, ListenConfig
from shared.generation import Delta
from shared.tls import TlsFiles, TlsRole
from tests.certificates import Authority
from tests.fakes.fake_generation import last

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from pathlib import Path

    from shared.generation import GenerateRequest
    from tests.service.gateway.http.conftest import RunningFront, StartFront

KEY = "a-secret-of-enough-characters"
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE")


@pytest.fixture
async def guarded(start_front: StartFront, tmp_path: Path) -> AsyncIterator[RunningFront]:
    """A front that wants a key."""
    (tmp_path / "keys").write_text(f"alice {KEY}\n")
    async with start_front(authenticator=Authenticator(tmp_path / "keys")) as front:
        yield front


async def status_of(front: RunningFront, method: str, target: str, *headers: str) -> int:
    """Status of a request with exactly this target."""
    reader, writer = await front.connect()
    lines = [f"{method} {target} HTTP/1.1", "Host: x", "Content-Length: 0", "Connection: close", *headers, "", ""]
    writer.write("\r\n".join(lines).encode("latin-1"))
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    await writer.wait_closed()
    return int(answer.split()[1])


def addresses(front: RunningFront) -> list[str]:
    routes = front.server._server.config.app.routes  # type: ignore[union-attr]
    paths = [route.path.replace("{model:path}", "synthetic:") for route in routes]
    assert len(paths) > 9
    return paths


async def test_every_address_wants_a_key_but_what_is_listed(guarded: RunningFront) -> None:
    for path in [*addresses(guarded), "/nope", "/v1/nope"]:
        for method in METHODS:
            status = await status_of(guarded, method, path)
            assert (status != 401) == (path.encode() in OPEN_PATHS), f"{method} {path}: {status}"


async def test_no_spelling_of_an_address_gets_around_the_key(guarded: RunningFront) -> None:
    for path in addresses(guarded):
        for spelled in (
            f"/{path}",
            f"//{path}",
            f"/health/..{path}",
            f"/health/%2e%2e{path}",
            f"/ready;{path}",
            f"/.{path}",
            f"{path}/",
            f"{path}%2f",
            f"{path}?api_key={KEY}",
            f"{path}?key={KEY}&authorization=Bearer%20{KEY}",
            f"http://x{path}",
            f"http://x/health/..{path}",
            path.upper() if path != "/" else "/HEALTH",
            "/%76" + path.removeprefix("/v") if path.startswith("/v") else "/%68ealth",
        ):
            for method in ("GET", "POST"):
                status = await status_of(guarded, method, spelled)
                opened = spelled.removeprefix("http://x").partition("?")[0].encode() in OPEN_PATHS
                assert opened or status in {400, 401}, f"{method} {spelled}: {status}"


@pytest.mark.parametrize(
    "headers",
    [
        ("Authorization: Bearer",),
        (f"Authorization: Basic {KEY}",),
        (f"Authorization: {KEY}",),
        (f"Authorization: Bearer {KEY}x",),
        (f"Authorization: Bearer {KEY[:-1]}",),
        (f"Authorization: Bearer \xe9{KEY}",),
        (f"X-Api-Key: {KEY}",),
        (f"Cookie: authorization=Bearer {KEY}",),
        (f"Authorization: Bearer {KEY}", "Authorization: Bearer other"),
    ],
)
async def test_what_is_no_key(guarded: RunningFront, headers: tuple[str, ...]) -> None:
    assert await status_of(guarded, "GET", "/v1/models", *headers) == 401


async def test_a_key_opens_and_says_who_calls(guarded: RunningFront, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Client] = []
    generate = guarded.generation.generate

    def generate_noting(request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        seen.append(calling_client())
        return generate(request)

    monkeypatch.setattr(guarded.generation, "generate", generate_noting)
    guarded.generation.answer = [last("y")]
    refused = await guarded.post("/v1/completions", {"prompt": "x"})
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.json()["error"]["code"] == "invalid_api_key"
    for key in (f"Bearer {KEY}", f"bearer  {KEY}"):
        for stream in (True, False):
            body = {"prompt": "x", "stream": stream}
            response = await guarded.post("/v1/completions", body, headers={"Authorization": key})
            assert response.status_code == 200
    assert seen == [Client("alice")] * 4
    assert calling_client() == ANONYMOUS


async def test_without_a_file_of_keys_any_key_will_do(front: RunningFront) -> None:
    for headers in ({}, {"Authorization": "Bearer none"}):
        assert (await front.client.get("/v1/models", headers=headers)).status_code == 200


ORIGIN = {"Origin": "https://a.example"}
PREFLIGHT = {**ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


async def test_other_origins_are_told_nothing(front: RunningFront) -> None:
    response = await front.client.get("/v1/models", headers=ORIGIN)
    assert not [name for name in response.headers if name.startswith("access-control")]
    assert (await front.client.options("/v1/models", headers=PREFLIGHT)).status_code == 405


async def test_a_page_of_another_origin_can_read_that_it_needs_a_key(start_front: StartFront, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"alice {KEY}\n")
    config = HttpConfig(cors_origins=("https://a.example",))
    async with start_front(config, Authenticator(tmp_path / "keys")) as front:
        response = await front.client.get("/v1/models", headers=ORIGIN)
        assert response.status_code == 401
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        assert (await front.client.options("/v1/models", headers=PREFLIGHT)).status_code == 200


async def test_a_page_of_another_origin_can_read_failures(start_front: StartFront) -> None:
    async with start_front(HttpConfig(cors_origins=("https://a.example",))) as front:
        front.generation.not_ready = RuntimeError("a fault of ours")
        for path in ("/v1/models", "/nope"):
            response = await front.client.get(path, headers=ORIGIN)
            assert response.status_code in {500, 404}
            assert "error" in response.json()
            assert response.headers["access-control-allow-origin"] == "https://a.example"
            assert "x-request-id" in response.headers


async def test_origins_that_are_listed_may_call(start_front: StartFront) -> None:
    async with start_front(HttpConfig(cors_origins=("https://a.example",))) as front:
        preflight = await front.client.options("/v1/completions", headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        assert "Authorization" in preflight.headers["access-control-allow-headers"]
        front.generation.answer = [last("y")]
        response = await front.post("/v1/completions", {"prompt": "x"}, headers=ORIGIN)
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        assert "access-control-allow-credentials" not in response.headers
        # Errors as well: a page could not read them otherwise.
        response = await front.post("/v1/completions", {}, headers=ORIGIN)
        assert response.status_code == 400
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        other = await front.client.get("/v1/models", headers={"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


FOREIGN = ("attacker.example", "Attacker.Example:8000", "127.0.0.1.attacker.example", "localhost.example.", "a.b:x:y")


async def test_a_name_that_somebody_may_own_is_refused_where_everybody_may_call(start_front: StartFront) -> None:
    async with start_front(HttpConfig(allowed_hosts=("Gateway.example",))) as front:
        for name in FOREIGN:
            for path in ("/v1/models", "/", "/health"):
                response = await front.client.get(path, headers={"Host": name})
                assert response.status_code == 403
                error = response.json()["error"]
                assert (error["type"], error["code"]) == ("permission_error", "host_not_allowed")
                assert "--allowed-host" in error["message"]
        assert await status_of(front, "GET", "/v1/models", "Host: attacker.example") == 403, "the second of two"
        for name in ("localhost", "LOCALHOST:1", "localhost.", "a.localhost:1", "127.0.0.1:1", "[::1]:1", "10.0.0.1"):
            assert (await front.client.get("/v1/models", headers={"Host": name})).status_code == 200, name
        for name in ("gateway.example", "GATEWAY.example:8000", "myhost"):
            assert (await front.client.get("/v1/models", headers={"Host": name})).status_code == 200, name


async def test_elsewhere_names_do_not_matter(
    start_front: StartFront, guarded: RunningFront, authority: Authority
) -> None:
    pair = authority.pair()
    for starting in (
        start_front(HttpConfig(ListenConfig("0.0.0.0"))),
        start_front(tls=TlsFiles(pair.certificate, pair.private_key, role=TlsRole.PUBLIC)),
    ):
        async with starting as front:
            for name in FOREIGN:
                assert (await front.client.get("/v1/models", headers={"Host": name})).status_code == 200
    headers = {"Host": FOREIGN[0], "Authorization": f"Bearer {KEY}"}
    assert (await guarded.client.get("/v1/models", headers=headers)).status_code == 200


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def test_over_tls(start_front: StartFront, authority: Authority) -> None:
    pair = authority.pair()
    async with start_front(tls=TlsFiles(pair.certificate, pair.private_key, role=TlsRole.PUBLIC)) as front:
        assert front.server.address.startswith("https://127.0.0.1:")
        front.generation.answer = [Delta("hello"), last("!")]
        trusting = ssl.create_default_context(cafile=authority.file)
        async with httpx2.AsyncClient(base_url=front.server.address, verify=trusting) as client:
            for stream in (True, False):
                response = await client.post("/v1/completions", json={"prompt": "x", "stream": stream})
                assert response.status_code == 200
                assert "hello" in response.text
        async with httpx2.AsyncClient(base_url=front.server.address, verify=ssl.create_default_context()) as client:
            with pytest.raises(httpx2.ConnectError):
                await client.get("/health")


async def test_clients_show_a_certificate_where_one_is_asked_for(start_front: StartFront, authority: Authority) -> None:
    pair = authority.pair()
    files = TlsFiles(pair.certificate, pair.private_key, authority.file, TlsRole.PUBLIC)
    async with start_front(tls=files) as front:
        trusting = ssl.create_default_context(cafile=authority.file)
        async with httpx2.AsyncClient(base_url=front.server.address, verify=trusting) as client:
            with pytest.raises(httpx2.TransportError):
                await client.get("/health")
        trusting.load_cert_chain(pair.certificate, pair.private_key)
        async with httpx2.AsyncClient(base_url=front.server.address, verify=trusting) as client:
            assert (await client.get("/health")).status_code == 200


async def test_leaving_over_tls_ends_the_request(start_front: StartFront, authority: Authority) -> None:
    pair = authority.pair()
    async with start_front(tls=TlsFiles(pair.certificate, pair.private_key, role=TlsRole.PUBLIC)) as front:
        trusting = ssl.create_default_context(cafile=authority.file)
        for stream in (True, False):
            _, writer = await asyncio.open_connection(*front.address, ssl=trusting)
            writer.write(front.raw("/v1/completions", {"prompt": "x", "stream": stream}))
            call = await front.generation.call()
            call.accept()
            writer.transport.abort()
            await asyncio.wait_for(call.closed.wait(), 1)


async def test_the_server_does_not_say_what_it_is(front: RunningFront) -> None:
    assert "server" not in (await front.client.get("/health")).headers
