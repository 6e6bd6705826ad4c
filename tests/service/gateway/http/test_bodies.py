"""Bodies and heads that are too large, too slow, of another kind, or no HTTP at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from typing import TYPE_CHECKING

import pytest

from services.gateway.api_keys import Authenticator
from services.gateway.http import app, connection
from shared.config import HttpConfig
from shared.generation import Delta
from tests.fakes.fake_generation import last

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.service.gateway.http.conftest import RunningFront, StartFront

PATH = "/v1/completions"
JSON = {"content-type": "application/json"}
MIB = 1 << 20
HEAD = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


async def chunks(num_bytes: int) -> AsyncIterator[bytes]:
    """A body of unknown length."""
    yield b'{"prompt": "'
    for _ in range(num_bytes // 65536):
        yield b"x" * 65536
    yield b'"}'


async def talk(front: RunningFront, *parts: str, within_s: float = 2.0) -> str:
    """Send parts of a request; all that comes back until the connection closes."""
    reader, writer = await front.connect()
    try:
        for part in parts:
            writer.write(part.encode("latin-1"))
            await writer.drain()
        return (await asyncio.wait_for(reader.read(), within_s)).decode()
    finally:
        writer.close()
        await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])


@pytest.mark.parametrize("announced", [True, False])
async def test_100_mb_are_cut_off_without_being_kept(front: RunningFront, announced: bool) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    content = b"x" * (100 * MIB) if announced else chunks(100 * MIB)
    response = await front.client.post(PATH, content=content, headers=JSON)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert "8388608" in response.json()["error"]["message"]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < (130 if announced else 40) * MIB, "100 MiB of it are the client's own, where they are in one piece"
    # The connection, or a new one, goes on.
    front.generation.answer = [last("y")]
    assert (await front.post(PATH, {"prompt": "x"})).status_code == 200


async def test_the_limit_is_to_the_byte(start_front: StartFront) -> None:
    async with start_front(HttpConfig(max_body_bytes=1024)) as front:
        front.generation.answer = [last("y")]
        for length, status in ((1024, 200), (1025, 413)):
            body = b'{"prompt":"' + b"x" * (length - 13) + b'"}'
            response = await front.client.post(PATH, content=body, headers=JSON)
            assert response.status_code == status


async def test_a_large_body_is_parsed_off_the_loop_and_arrives(front: RunningFront) -> None:
    front.generation.answer = [last("y")]
    assert (await front.post(PATH, {"prompt": [7] * 500_000})).status_code == 200
    request = (await front.generation.call()).request
    assert request.prompts == [[7] * 500_000]  # type: ignore[union-attr]  # it is a completion


async def test_who_asks_first_is_told_before_sending(front: RunningFront) -> None:
    reader, writer = await front.connect()
    writer.write(f"{HEAD}Expect: 100-continue\r\nContent-Length: {100 * MIB}\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 2)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer
    writer.write(f"{HEAD}Expect: 100-continue\r\nContent-Length: 14\r\n\r\n".encode())
    writer.close()
    reader, writer = await front.connect()
    writer.write(f"{HEAD}Expect: 100-continue\r\nContent-Length: 14\r\n\r\n".encode())
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 2) == b"HTTP/1.1 100 Continue\r\n\r\n"
    front.generation.answer = [last("y")]
    writer.write(b'{"prompt":"x"}')
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 2)).startswith(b"HTTP/1.1 200 ")
    writer.close()


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        (None, 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/jsonp", 415),
        ("", 415),
    ],
)
async def test_bodies_are_json(front: RunningFront, content_type: str | None, status: int) -> None:
    front.generation.answer = [last("y")]
    headers = {} if content_type is None else {"content-type": content_type}
    response = await front.client.post(PATH, content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == status, response.text


async def test_bodies_are_not_compressed(front: RunningFront) -> None:
    headers = JSON | {"content-encoding": "gzip"}
    assert (await front.client.post(PATH, content=b"\x1f\x8b", headers=headers)).status_code == 415


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b'"x"', b"null", b"\xff", b'\xef\xbb\xbf{"prompt":"x"}'])
async def test_bodies_that_are_no_objects(front: RunningFront, body: bytes) -> None:
    response = await front.client.post(PATH, content=body, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


async def test_a_body_that_does_not_come(start_front: StartFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_BODY_TIMEOUT_S", 0.1)
    async with start_front() as front:
        reader, writer = await front.connect()
        writer.write(f"{HEAD}Content-Length: 10\r\n\r\n{{".encode())
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 2)).startswith(b"HTTP/1.1 408 ")
        assert b'"type":"timeout_error"' in await asyncio.wait_for(reader.readuntil(b"}}"), 2)
        writer.close()


async def test_a_head_that_does_not_come(front: RunningFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    assert not await talk(front)
    assert not await talk(front, HEAD)
    assert not await talk(front, "\r\n", "\r\n")


async def test_the_rest_of_a_refused_body_is_read_for_a_while_only(
    front: RunningFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    reader, writer = await front.connect()
    writer.write(f"{HEAD}Content-Length: {1 << 40}\r\n\r\n".encode())
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 2)).startswith(b"HTTP/1.1 413 ")

    async def send_on() -> None:
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(send_on(), 5)
    writer.close()


async def test_a_head_without_end(front: RunningFront) -> None:
    answer = await talk(front, HEAD, *["X-Long: " + "x" * 10_000 + "\r\n"] * 10)
    assert answer.startswith("HTTP/1.1 431 ")
    assert '"error"' in answer


async def test_a_head_that_is_too_large_in_one_piece(front: RunningFront) -> None:
    for head in ("GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n", HEAD + "Content-Length: 14\r\n"):
        answer = await talk(front, f'{head}X-Long: {"x" * 70_000}\r\n\r\n{{"prompt":"x"}}')
        assert answer.startswith("HTTP/1.1 431 ")
        assert answer.count("HTTP/1.1") == 1


CHUNKED = "Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("opening", "more"),
    [
        (f"{HEAD}{CHUNKED}0\r\nA: ", "a"),
        (f"{HEAD}{CHUNKED}0\r\n", "A: a\r\n"),
        (f"{HEAD}{CHUNKED}1;", "a=b;"),
        (f"GET /health HTTP/1.1\r\nHost: x\r\n{CHUNKED}0\r\nA: ", "a"),
    ],
)
async def test_what_surrounds_a_body_has_a_limit(front: RunningFront, opening: str, more: str) -> None:
    reader, writer = await front.connect()
    writer.write(opening.encode())
    sent = 0

    async def send_on() -> None:
        nonlocal sent
        while True:
            writer.write(more.encode() * (4096 // len(more)))
            await writer.drain()
            sent += 4096

    sending = asyncio.create_task(send_on())
    with contextlib.suppress(ConnectionError):
        assert b"x" * MIB not in await asyncio.wait_for(reader.read(), 5)
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(sending, 5)
    assert sent < 16 * MIB, "what the host's buffers may take"
    writer.close()


async def test_trailers_are_no_headers(start_front: StartFront, tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("alice a-secret-key-of-alice\n")
    async with start_front(authenticator=Authenticator(key_file)) as front:
        answer = await talk(
            front, f"{HEAD}Connection: close\r\n{CHUNKED}0\r\nAuthorization: Bearer a-secret-key-of-alice\r\n\r\n"
        )
    assert answer.startswith("HTTP/1.1 401 ")
    async with start_front() as front:
        front.generation.answer = [last("y")]
        body = f'{CHUNKED}e\r\n{{"prompt":"x"}}\r\n0\r\nX-Request-Id: trailer\r\n\r\n'
        answer = await talk(front, f"{HEAD}Connection: close\r\n{body}")
    assert answer.startswith("HTTP/1.1 200 ")
    assert "x-request-id: trailer" not in answer


async def test_a_body_of_tiny_chunks_is_a_body(front: RunningFront) -> None:
    front.generation.answer = [last("y")]
    body = '{"prompt":"' + "x" * 60_000 + '"}'
    chunked = "".join(f"1;a=b\r\n{character}\r\n" for character in body)
    answer = await talk(front, f"{HEAD}Connection: close\r\n{CHUNKED}{chunked}0\r\n\r\n", within_s=10)
    assert answer.startswith("HTTP/1.1 200 ")


async def test_http_1_0_has_no_chunks(front: RunningFront) -> None:
    front.generation.answer = [Delta("x"), last("y")]
    for body in ('{"prompt":"x","stream":true}', '{"prompt":"x"}'):
        head = HEAD.replace("HTTP/1.1", "HTTP/1.0")
        answer = await talk(front, f"{head}Content-Length: {len(body)}\r\n\r\n{body}")
        head, _, text = answer.partition("\r\n\r\n")
        assert "200 OK" in head
        assert "chunked" not in head
        if "stream" in body:
            assert text.startswith("data: ")
            assert text.endswith("\n\ndata: [DONE]\n\n")
        else:
            assert json.loads(text)["choices"][0]["text"] == "xy"


@pytest.mark.parametrize("version", ["2.0", "0.9"])
async def test_other_versions_are_refused(front: RunningFront, version: str) -> None:
    answer = await talk(front, f'POST {PATH} HTTP/{version}\r\nHost: x\r\nContent-Length: 14\r\n\r\n{{"prompt":"x"}}')
    assert answer.startswith("HTTP/1.1 505 ")
    assert answer.count("HTTP/1.1") == 2, "its message says it, too"


async def test_a_refusal_is_no_part_of_another_response(front: RunningFront) -> None:
    reader, writer = await front.connect()
    writer.write(front.raw(PATH, {"prompt": "x", "stream": True}))
    call = await front.generation.call()
    call.accept()
    call.send(Delta("a"))
    await asyncio.wait_for(reader.readuntil(b"a"), 2)
    writer.write(b"nonsense\r\n\r\n")
    assert b"HTTP/1.1 400" not in await asyncio.wait_for(reader.read(), 2)
    writer.close()


@pytest.mark.parametrize(
    "text",
    [
        "nonsense\r\n\r\n",
        "GET / HTTP/1.1 " + "x" * 100_000,
        "GET / HTTP/9.9\r\n\r\n",
        "GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        f"{HEAD}Content-Length: -1\r\n\r\n",
        f"{HEAD}Content-Length: x\r\n\r\n",
        f"{HEAD}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        f"{HEAD}Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_no_http_is_refused_in_the_usual_shape(front: RunningFront, text: str) -> None:
    answer = await talk(front, text)
    assert answer.startswith("HTTP/1.1 400 "), answer
    assert '"error"' in answer


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "TLS/1.0"])
@pytest.mark.parametrize("at_once", [True, False])
async def test_another_protocol_is_not_what_we_speak(front: RunningFront, protocol: str, at_once: bool) -> None:
    front.generation.answer = [last("y")]
    wish = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {protocol}\r\nHTTP2-Settings: AAMAAABk\r\n"
    request = f'{HEAD}{wish}Content-Length: 14\r\n\r\n{{"prompt":"x"}}'
    final = f'{HEAD}Connection: close\r\nContent-Length: 14\r\n\r\n{{"prompt":"y"}}'
    answer = await talk(front, request + final) if at_once else await talk(front, *request, final)
    assert answer.count("HTTP/1.1 200 OK") == 2, answer
    for prompt in ("x", "y"):
        assert (await front.generation.call()).request.prompts == [prompt]  # type: ignore[union-attr]  # completions


async def test_it_is_no_proxy(front: RunningFront) -> None:
    answer = await talk(front, "CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n")
    assert answer.startswith("HTTP/1.1 405 ")


async def test_a_connection_serves_one_request_after_the_other(front: RunningFront) -> None:
    front.generation.answer = [last("y")]
    one = f'{HEAD}Content-Length: 14\r\n\r\n{{"prompt":"x"}}'
    final = f'{HEAD}Connection: close\r\nContent-Length: 14\r\n\r\n{{"prompt":"x"}}'
    answer = await talk(front, one + one + "GET /nope HTTP/1.1\r\nHost: x\r\n\r\n" + final)
    assert [line for line in answer.split("\r\n") if "HTTP/1.1 " in line] != []
    assert answer.count("HTTP/1.1 200 OK") == 3
    assert answer.count("HTTP/1.1 404 Not Found") == 1
