"""Debian's Chromium for tests of the page: what a user's browser does, and what it complains of."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from playwright.async_api import async_playwright

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import ConsoleMessage, Page, Request

__all__ = ["DESKTOP", "PHONE", "OpenPage", "open_page"]

DESKTOP: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 360, "height": 740},
    "device_scale_factor": 2,
    "is_mobile": True,
    "has_touch": True,
}


@dataclass
class OpenPage:
    """A page in a browser of its own."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    """Errors of its console, and exceptions that nobody caught."""
    hosts: set[str] = field(default_factory=set)
    """host:port of everything that it asked for."""

    async def text(self, selector: str) -> str:
        """What an element says."""
        return await self.page.locator(selector).inner_text()

    async def fits(self) -> bool:
        """Nothing is wider than the screen."""
        wide: bool = await self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        return wide


@contextlib.asynccontextmanager
async def open_page(url: str, **options: Any) -> AsyncIterator[OpenPage]:
    """Open ``url`` in a fresh browser; ``options`` are those of a Playwright context. Skips where there is none."""
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("there is no chromium on this machine; on Debian: apt-get install chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        try:
            context = await browser.new_context(**DESKTOP | options)
            context.set_default_timeout(20_000)
            opened = OpenPage(await context.new_page())

            def on_console(message: ConsoleMessage) -> None:
                if message.type == "error":
                    opened.complaints.append(message.text)

            def on_request(request: Request) -> None:
                opened.hosts.add(urlsplit(request.url).netloc)

            opened.page.on("console", on_console)
            opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
            opened.page.on("request", on_request)
            await opened.page.goto(url)
            yield opened
        finally:
            await browser.close()
