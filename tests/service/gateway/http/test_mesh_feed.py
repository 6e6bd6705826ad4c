"""``GET /api/mesh``, and the files of the page."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any, cast

import httpx2
import pytest

from services.gateway.api_keys import Authenticator
from services.gateway.http import page
from services.gateway.http.app import build_app
from services.gateway.http.mesh_feed import feed_routes, snapshot_json
from services.gateway.http.server import HttpServer
from shared.config import HttpConfig, ListenConfig
from shared.errors import OverloadedError
from tests.fakes.fake_generation import FakeGeneration
from tests.fakes.fake_watch import BUSY, FakeWatch
from tests.service.gateway.http.conftest import FakeReadiness

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from services.gateway.generation import Generation
    from services.gateway.readiness import Readiness
    from services.gateway.watch import MeshWatch

SECRET = "a-secret-of-some-length"


@contextlib.asynccontextmanager
async def serving(watch: FakeWatch, keys: Authenticator | None = None) -> AsyncIterator[httpx2.AsyncClient]:
    app = build_app(
        HttpConfig(),
        cast("Generation", FakeGeneration()),
        cast("Readiness", FakeReadiness()),
        keys or Authenticator(),
        feed_routes(cast("MeshWatch", watch)),
    )
    server = HttpServer(app, ListenConfig(port=0))
    task = asyncio.create_task(server.serve())
    try:
        async with httpx2.AsyncClient(base_url=server.address, timeout=10) as client:
            yield client
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def first_event(client: httpx2.AsyncClient, path: str, **options: Any) -> dict[str, Any]:
    async with client.stream("GET", path, **options) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                return event
    raise AssertionError("no event")


async def test_the_feed_tells_what_the_watch_sees() -> None:
    watch = FakeWatch()
    async with serving(watch) as client:
        event = await first_event(client, "/api/mesh?interval_s=0.25")
        await watch.left()
    assert watch.intervals_s == [0.25]
    assert event == json.loads(snapshot_json(BUSY))
    assert event["gateway_id"] == BUSY.gateway_id
    assert event["engine"]["status"]["info"]["num_stages"] == 2
    first = event["engine"]["stages"][0]
    assert first["step_ids"][:3] == [0, 1, 2]
    assert first["num_tokens"][0] - first["num_decode_tokens"][0] == 10
    assert first["ended_us_ago"][-1] == 30_000
    assert first["started_us_ago"][-1] == 50_000


async def test_intervals_and_refusals_have_their_status() -> None:
    watch = FakeWatch()
    async with serving(watch) as client:
        for bad in ("0.1", "soon", "", "nan"):
            refused = await client.get("/api/mesh", params={"interval_s": bad})
            assert refused.status_code == 400
            assert "interval" in refused.json()["error"]["message"]
        watch.refusal = OverloadedError("32 watch this gateway already")
        refused = await client.get("/api/mesh")
        assert refused.status_code == 429
        assert "32 watch" in refused.json()["error"]["message"]


async def test_the_page_is_open_and_what_it_shows_is_not(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice {SECRET}\n")
    async with serving(FakeWatch(), Authenticator(keys)) as client:
        for path in sorted(page.OPEN_PATHS):
            assert (await client.get(path.decode())).status_code == 200
        assert (await client.get("/api/mesh")).status_code == 401
        assert (await client.get("/static/")).status_code == 401
        assert (await client.get("/static/../page.py")).status_code == 401
        event = await first_event(client, "/api/mesh", headers={"authorization": f"Bearer {SECRET}"})
        assert event["engine"]["status"]["ready"]


async def test_the_files_of_the_page_hold_to_themselves() -> None:
    async with serving(FakeWatch()) as client:
        index = await client.get("/")
        assert index.headers["content-type"] == "text/html; charset=utf-8"
        policy = index.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert index.headers["x-content-type-options"] == "nosniff"
        assert (await client.head("/")).status_code == 200
        assert (await client.post("/")).status_code == 405
        again = await client.get("/", headers={"if-none-match": index.headers["etag"]})
        assert again.status_code == 304
        assert again.content == b""
        assert (await client.get("/static/nothing.js")).status_code == 404
        named = {path for path in page.OPEN_PATHS if path != b"/"}
        for file in named:
            text = (await client.get(file.decode())).text
            assert "innerHTML" not in text
            assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
            assert "https://" not in text


@pytest.mark.parametrize("forbidden", ["<script>", " style=", "onclick", "onload"])
async def test_nothing_in_the_page_is_inline(forbidden: str) -> None:
    async with serving(FakeWatch()) as client:
        assert forbidden not in (await client.get("/")).text
