"""The load client on both event loops."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that the command runs on, and the one where there is no such."""
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
