"""Waiting for the end of a process that is not a child of ours."""

from __future__ import annotations

import asyncio
import os

__all__ = ["wait_ended"]


async def wait_ended(pid: int, *, timeout_s: float = 10.0) -> None:
    """Return once ``pid`` has ended, reaped or not; raise ``TimeoutError`` where it lives on."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(watched, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), timeout_s)
    finally:
        loop.remove_reader(watched)
        os.close(watched)
