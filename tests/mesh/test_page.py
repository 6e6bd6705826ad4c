"""The page against a mesh of real processes: what a newcomer sees in the first minute."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import expect

from services.mesh import LocalMesh, MeshOptions
from shared.client import GatewayClient
from shared.config import EngineConfig
from shared.topology import Topology
from tests.browser import open_page

pytestmark = pytest.mark.slow


async def test_chat_and_live_view_of_a_real_mesh() -> None:
    options = MeshOptions(engine=EngineConfig(model="synthetic:step_ms=5", topology=Topology(2)))
    async with (
        LocalMesh(options) as mesh,
        GatewayClient(mesh.gateway_address) as client,
        open_page(mesh.http_address) as browser,
    ):
        page = browser.page
        await page.wait_for_selector("#state[data-state=ready]")
        await expect(page.locator("#workers li[data-state=ready]")).to_have_count(2)
        # An answer without an end: it streams, and the mesh is seen to work on it.
        await page.fill("#prompt", "hello")
        await page.press("#prompt", "Enter")
        await expect(page.locator(".turn.assistant .body")).to_contain_text("quick brown fox")
        await expect(page.locator("#running")).to_have_text("1")
        await expect(page.locator("#at-gateway")).to_have_text("1 at this gateway")
        await expect(page.locator("#timeline")).to_have_attribute(
            "aria-label", re.compile(r"stage 0 [1-9]\d* % busy, stage 1 [1-9]")
        )
        await expect(page.locator("#output-rate")).to_have_text(re.compile(r"[1-9]"))
        await expect(page.locator("#step-time")).to_have_text(re.compile(r"^[\d.]+ ms$"))
        # Stopped, it costs nothing any more.
        await page.click("#send")
        await page.wait_for_selector(".turn.assistant:not(.pending)")
        await expect(page.locator("#running")).to_have_text("0")
        status = (await client.status()).engine
        assert status.num_used_slots == 0
        assert browser.complaints == []
        assert len(browser.hosts) == 1
