from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from services.gateway.scheduler_client import back_off

if TYPE_CHECKING:
    import pytest


async def test_pauses_double_up_to_a_limit_and_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def record(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", record)
    for attempt in [0, 1, 2, 3, 4, 5, 6, 10**6]:
        await back_off(attempt)
    longest = [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
    assert all(limit / 2 <= pause <= limit for pause, limit in zip(pauses, longest, strict=True))
    assert len(set(pauses)) == len(pauses)
