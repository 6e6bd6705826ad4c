"""The event loops of the load client, and the scripted server that it is put in front of."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import uvloop

from tests.fakes.fake_openai import FakeOpenAi

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that the command runs on; where it is about sockets, the standard library's as well."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
    is_about_sockets = item.path.stem in {"test_http_load", "test_http_failures"}
    return loops | {"asyncio": asyncio.new_event_loop} if is_about_sockets else loops


@pytest.fixture
async def server() -> AsyncIterator[FakeOpenAi]:
    async with FakeOpenAi().serving() as server:
        yield server
