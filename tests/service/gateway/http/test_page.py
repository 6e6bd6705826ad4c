"""The page in a browser, with a scripted gateway behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from playwright.async_api import expect

from services.gateway.api_keys import Authenticator
from services.gateway.http.app import build_app
from services.gateway.http.mesh_feed import feed_routes
from services.gateway.http.server import HttpServer
from shared.config import HttpConfig, ListenConfig
from shared.errors import InvalidRequestError, OverloadedError
from shared.generation import ChatRequest, Delta
from shared.messages import FinishReason
from tests.browser import PHONE, OpenPage, open_page
from tests.fakes.fake_generation import FakeGeneration, last
from tests.fakes.fake_watch import BUSY, FakeWatch, not_ready
from tests.service.gateway.http.conftest import FakeReadiness

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from playwright.async_api import Page, Request

    from services.gateway.generation import Generation
    from services.gateway.readiness import Readiness
    from services.gateway.watch import MeshWatch

pytestmark = pytest.mark.slow

SECRET = "a-secret-of-some-length"
ANSWERED = ".turn.assistant:not(.pending)"


@dataclass
class Gateway:
    url: str
    generation: FakeGeneration
    watch: FakeWatch


@contextlib.asynccontextmanager
async def serving(keys: Authenticator | None = None) -> AsyncIterator[Gateway]:
    generation, watch = FakeGeneration(), FakeWatch()
    app = build_app(
        HttpConfig(),
        cast("Generation", generation),
        cast("Readiness", FakeReadiness()),
        keys or Authenticator(),
        feed_routes(cast("MeshWatch", watch)),
    )
    server = HttpServer(app, ListenConfig(port=0))
    task = asyncio.create_task(server.serve())
    try:
        yield Gateway(server.address, generation, watch)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[tuple[Gateway, OpenPage, Page]]:
    async with serving() as gateway, open_page(gateway.url, **options) as browser:
        yield gateway, browser, browser.page


async def say(page: Page, text: str) -> None:
    await page.fill("#prompt", text)
    await page.press("#prompt", "Enter")


async def test_it_loads_in_peace_and_from_nowhere_else() -> None:
    async with opened() as (gateway, browser, page):
        await page.wait_for_selector("#state[data-state=ready]")
        await page.wait_for_load_state("load")
        assert browser.hosts == {gateway.url.removeprefix("http://")}
        assert browser.complaints == []
        assert await page.title() == "Orca mesh"
        assert gateway.watch.intervals_s == [0.5]
        # Whatever can be pressed or filled in has a name.
        nameless = await page.evaluate(
            "[...document.querySelectorAll('button, input, textarea, select')].filter(node => "
            "!(node.labels?.length || node.innerText?.trim() || node.textContent?.trim() || node.ariaLabel)).length"
        )
        assert nameless == 0
    await gateway.watch.left()


async def test_the_mesh_is_seen() -> None:
    async with opened() as (gateway, browser, page):
        await page.wait_for_selector("#state[data-state=ready]")
        for place, said in {
            "#output-rate": "120",
            "#prefill-rate": "7.3",
            "#step-time": "20.0 ms",
            "#batch-size": "3",
            "#running": "3",
            "#waiting": "2",
            "#preempted": "1",
            "#kv-used": "16",
            "#kv-cached": "8",
            "#kv-free": "24",
            "#hit-rate": "prefix cache: 25 % of 200 prompt tokens",
            "#at-gateway": "5 at this gateway",
            "#mesh-facts": "2 stages × 1 rank · float32 · context 64",
            "#gateway-id": "gateway 127.0.0.1:50051",
        }.items():
            assert await browser.text(place) == said
        assert (await page.locator("#workers li").all_inner_texts())[1].split("\n") == [
            "stage 1 · rank 0",
            "loading: weights 40 %",
            "127.0.0.1:7002",
        ]
        assert await page.get_attribute("#kv-bar", "aria-label") == "K/V slots: 16 used, 8 cached, 24 free of 48"
        await page.select_option("#window", "5")
        colours = await lane_colours(page)
        assert len(colours) == 2, "a lane for each stage"
        for stage in colours:
            assert stage == {"decode", "prefill"}
        # What an iteration was, under the pointer.
        await page.click("#pause")
        await page.hover("#timeline", position={"x": await last_step_x(page), "y": 30})
        tip = await browser.text("#tip")
        assert "stage 0 · 20.0 ms" in tip
        assert "3 requests: 3 decode + 0 prefill tokens" in tip
        assert browser.complaints == []
        await gateway.watch.tell(not_ready("the engine lost a worker and is recovering"))
        await page.wait_for_selector("#state[data-state=waiting]")
        assert await browser.text("#mesh-notice") == "The engine lost a worker and is recovering."


async def lane_colours(page: Page) -> list[set[str]]:
    """Which of the two colours each lane of the timeline has, from its pixels; waits for the first."""
    script = """() => {
      const canvas = document.getElementById("timeline");
      const style = getComputedStyle(canvas);
      const context = canvas.getContext("2d");
      const rgb = (name) => {
        const probe = new OffscreenCanvas(1, 1).getContext("2d");
        probe.fillStyle = style.getPropertyValue(name).trim();
        probe.fillRect(0, 0, 1, 1);
        return probe.getImageData(0, 0, 1, 1).data.slice(0, 3).join();
      };
      const names = {[rgb("--decode")]: "decode", [rgb("--prefill")]: "prefill"};
      const lanes = [0, 1].map((lane) => {
        const y = Math.round((lane * 62 + 18) * devicePixelRatio);
        const {data} = context.getImageData(0, y, canvas.width, Math.round(34 * devicePixelRatio));
        const found = new Set();
        for (let at = 0; at < data.length; at += 4) {
          const name = names[data.slice(at, at + 3).join()];
          if (name) found.add(name);
        }
        return [...found];
      });
      return lanes.every((lane) => lane.length) && lanes;
    }"""
    found = await page.wait_for_function(script)
    return [set(lane) for lane in await found.json_value()]


async def last_step_x(page: Page) -> float:
    """Where the latest iteration of the first lane is, from the left of the timeline."""
    found: float = await page.evaluate(
        """() => {
          const canvas = document.getElementById("timeline");
          const {data} = canvas.getContext("2d").getImageData(0, Math.round(30 * devicePixelRatio), canvas.width, 1);
          const lane = data.slice(0, 3).join();
          const first = [...Array(canvas.width).keys()].reverse();
          const decode = getComputedStyle(canvas).getPropertyValue("--decode").trim();
          const probe = new OffscreenCanvas(1, 1).getContext("2d");
          probe.fillStyle = decode;
          probe.fillRect(0, 0, 1, 1);
          const wanted = probe.getImageData(0, 0, 1, 1).data.slice(0, 3).join();
          return first.find((x) => data.slice(4 * x, 4 * x + 3).join() === wanted) / devicePixelRatio;
        }"""
    )
    return found


async def test_an_answer_streams_and_is_remembered() -> None:
    async with opened() as (gateway, browser, page):
        await page.click("#settings-button")
        await page.fill("#system", "Be brief.")
        await page.fill("#max-tokens", "7")
        await page.fill("#seed", "11")
        await say(page, "hello")
        call = await gateway.generation.call()
        assert isinstance(call.request, ChatRequest)
        assert [(m.role, m.content) for m in call.request.messages] == [("system", "Be brief."), ("user", "hello")]
        options = call.request.options
        assert (options.max_tokens, options.seed, options.temperature, options.top_p) == (7, 11, 0.7, 0.95)
        call.accept()
        call.send(Delta("Hel"))
        await expect(page.locator(".turn.assistant .body")).to_have_text("Hel")
        assert await page.get_attribute("#log", "aria-busy") == "true"
        assert await browser.text("#send") == "Stop"
        call.send(Delta("lo **you**"), last(" there", reason=FinishReason.STOP))
        await page.wait_for_selector(ANSWERED)
        assert await browser.text(".turn.assistant .body") == "Hello you there"
        assert await browser.text(".turn.assistant strong") == "you"
        meta = await browser.text(".turn.assistant .meta")
        assert "tok/s · first token" in meta
        assert "3 prompt (2 cached) + 5 output tokens" in meta
        assert await browser.text("#announcement") == "Answer complete, 5 tokens"
        await say(page, "and again")
        call = await gateway.generation.call()
        assert isinstance(call.request, ChatRequest)
        assert [m.content for m in call.request.messages][1:] == ["hello", "Hello **you** there", "and again"]
        call.accept()
        call.send(last("Yes."))
        await page.wait_for_selector(f"{ANSWERED} >> nth=1")
        assert "cut at max tokens" in await page.locator(".turn.assistant .meta").nth(1).inner_text()
        # Another answer to the same question, which forgets the one before.
        await page.locator(".turn.assistant").nth(0).get_by_role("button", name="Again").click()
        call = await gateway.generation.call()
        assert isinstance(call.request, ChatRequest)
        assert [m.content for m in call.request.messages] == ["Be brief.", "hello"]
        call.accept()
        call.send(last("Hi."))
        await page.wait_for_selector(ANSWERED)
        assert await page.locator(".turn").count() == 2
        await page.click("#new-chat")
        assert await page.locator(".turn").count() == 0
        assert await page.is_visible("#welcome")
        assert browser.complaints == []


async def test_stop_gives_the_request_up() -> None:
    async with opened() as (gateway, browser, page):
        for by_key in (False, True):
            await say(page, "count")
            call = await gateway.generation.call()
            call.accept()
            call.send(Delta("one two"))
            await expect(page.locator(".turn:last-child .body")).to_have_text("one two")
            await (page.keyboard.press("Escape") if by_key else page.click("#send"))
            await asyncio.wait_for(call.closed.wait(), 10)
            await page.wait_for_selector(".turn:last-child:not(.pending)")
            assert (await page.locator(".turn.assistant .meta").last.inner_text()).endswith("stopped")
        assert browser.complaints == []
        # What was said until then stays part of the conversation.
        await say(page, "go on")
        request = (await gateway.generation.call()).request
        assert isinstance(request, ChatRequest)
        assert [m.content for m in request.messages] == ["count", "one two", "count", "one two", "go on"]


async def test_failures_are_told_in_words() -> None:
    async with opened() as (gateway, browser, page):
        gateway.generation.answer = [OverloadedError("256 requests wait already, which is the limit; try again later")]
        # Accepted, and then an error within the stream.
        await say(page, "hello")
        await page.wait_for_selector(".error")
        assert "256 requests wait already" in await browser.text(".error")
        gateway.generation.answer = [last("Here I am.")]
        await page.get_by_role("button", name="Try again").click()
        await page.wait_for_selector(ANSWERED)
        assert await browser.text(".turn.assistant .body") == "Here I am."
        assert await page.locator(".error").count() == 0
        # Refused at the door.
        await gateway.generation.call()
        await gateway.generation.call()
        gateway.generation.answer = None
        await say(page, "much")
        (await gateway.generation.call()).send(InvalidRequestError("max_tokens is over the context; lower it"))
        await page.wait_for_selector(".error")
        assert await browser.text(".error") == "max_tokens is over the context; lower it"
        # Not even sent.
        await page.click("#settings-button")
        await page.fill("#max-tokens", "-3")
        await say(page, "less than nothing")
        await page.wait_for_selector(".error >> nth=1")
        assert "Max tokens: " in await page.locator(".error").nth(1).inner_text()


async def test_what_a_model_says_is_never_markup() -> None:
    text = (
        "# Title\n<img src=x onerror=alert(1)> [link](javascript:alert(1))\n\n- one\n- *two*\n\n"
        "```js\n<script>alert(1)</script>\n```\nsnake_case_name `a<b>`"
    )
    async with opened() as (gateway, browser, page):
        pieces = [text[at : at + 5] for at in range(0, len(text), 5)]
        gateway.generation.answer = [*map(Delta, pieces[:-1]), last(pieces[-1])]
        await say(page, "show")
        await page.wait_for_selector(ANSWERED)
        body = page.locator(".turn.assistant .body")
        assert await body.locator("img, script, a").count() == 0
        assert await body.locator("h3").inner_text() == "Title"
        assert "<img src=x onerror=alert(1)> [link](javascript:alert(1))" in await body.inner_text()
        assert await body.locator("li").all_inner_texts() == ["one", "two"]
        assert await body.locator("pre code").inner_text() == "<script>alert(1)</script>"
        assert await body.locator("p").last.inner_text() == "snake_case_name a<b>"
        assert await body.locator("em").all_inner_texts() == ["two"]
        assert browser.complaints == []


async def test_the_key_is_asked_for_used_and_kept_in_the_tab_only(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice {SECRET}\n")
    async with serving(Authenticator(keys)) as gateway, open_page(gateway.url) as browser:
        page = browser.page
        await page.wait_for_selector("#key-dialog[open]")
        assert "asks for an API key" in await browser.text("#key-reason")
        assert await browser.text("#state-text") == "key needed"
        await page.fill("#key", "not-the-right-secret")
        await page.press("#key", "Enter")
        await expect(page.locator("#key-reason")).to_contain_text("does not take this key")
        await page.fill("#key", SECRET)
        await page.click("text=Use this key")
        await page.wait_for_selector("#state[data-state=ready]")
        gateway.generation.answer = [last("For you.")]
        await say(page, "hello")
        await page.wait_for_selector(ANSWERED)
        assert await browser.text(".turn.assistant .body") == "For you."
        stored = await page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])")
        session, local, cookie = json.loads(stored)
        assert (session, local, cookie) == ({"orca-api-key": SECRET}, {}, "")
        await page.reload()
        await page.wait_for_selector("#state[data-state=ready]")
        # Taken away again, it is asked for again; nothing is stored.
        await page.click("#key-button")
        await page.fill("#key", "")
        await page.click("text=Use this key")
        await page.wait_for_selector("#state[data-state=locked]")
        assert await page.evaluate("sessionStorage.length") == 0


async def test_a_feed_that_breaks_is_taken_up_again() -> None:
    async with opened() as (gateway, browser, page):
        await page.wait_for_selector("#state[data-state=ready]")
        asked: list[Request] = []
        page.on("request", lambda request: asked.append(request) if "/api/mesh" in request.url else None)
        gateway.watch.refusal = OverloadedError("32 watch this gateway already")
        await gateway.watch.end()
        await page.wait_for_selector("#state[data-state=lost]")
        assert "32 watch this gateway already" in await browser.text("#mesh-notice")
        gateway.watch.refusal = None
        await page.wait_for_selector("#state[data-state=ready]")
        assert await page.is_hidden("#mesh-notice")
        assert len(asked) >= 2


async def test_a_phone_has_room_for_all_of_it() -> None:
    async with opened(**PHONE) as (gateway, browser, page):
        await page.wait_for_selector("#state[data-state=ready]")
        assert await browser.fits()
        assert await page.is_hidden("#mesh")
        gateway.generation.answer = [Delta("word " * 40 + "`" + "x" * 300 + "`\n```\n" + "y" * 300), last("\n```")]
        await page.fill("#prompt", "hello " * 30)
        await page.tap("#send")
        await page.wait_for_selector(ANSWERED)
        assert await browser.fits()
        await page.tap("#settings-button")
        assert await browser.fits()
        await page.focus("#tab-chat")
        await page.keyboard.press("ArrowRight")
        assert await page.is_visible("#mesh")
        assert await page.is_hidden("#chat")
        assert await page.get_attribute("#tab-mesh", "aria-selected") == "true"
        assert await browser.fits()
        await page.select_option("#window", "5")
        await lane_colours(page)
        wide = await page.evaluate(
            "[...document.querySelectorAll('#mesh *')].filter(node => node.getBoundingClientRect().right > innerWidth)"
            ".map(node => node.id || node.className)"
        )
        assert wide == []
        assert browser.complaints == []


async def test_dark_and_light_and_less_motion() -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    async with opened(color_scheme="dark", reduced_motion="reduce") as (gateway, browser, page):
        dark = await page.evaluate(background)
        await page.emulate_media(color_scheme="light")
        light = await page.evaluate(background)
        assert dark != light
        await page.click("#theme-button")  # away from what the system has
        assert await page.evaluate(background) == dark
        await page.reload()
        assert await page.evaluate(background) == dark, "the choice is kept"
        assert await browser.text("#theme-label") == "Theme: dark"
        await page.click("#theme-button")
        await page.click("#theme-button")
        assert await browser.text("#theme-label") == "Theme: as the system"
        assert await page.evaluate("localStorage.length") == 0
        await lane_colours(page)
        await say(page, "hello")
        await gateway.generation.call()
        assert await page.evaluate("document.getAnimations().length") == 0
        assert browser.complaints == []


async def test_nobody_who_looks_nobody_who_collects() -> None:
    async with opened() as (gateway, _, page):
        await page.wait_for_selector("#state[data-state=ready]")
        assert gateway.watch.num_watchers == 1
        await page.evaluate(
            "Object.defineProperty(document, 'hidden', {configurable: true, get: () => true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        await gateway.watch.left()
        await gateway.watch.tell(replace(BUSY, num_gateway_requests=77))
        await page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
        await expect(page.locator("#at-gateway")).to_have_text("77 at this gateway")
