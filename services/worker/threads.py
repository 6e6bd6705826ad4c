"""Blocking work beside the event loop: a daemon thread whose end is a future of the loop.

Not the loop's own thread pool, because that is waited for at exit, and a thread may be held in a library's call that
ends only by its time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["start_thread"]

_Result = TypeVar("_Result")


def start_thread(work: Callable[[], _Result], name: str) -> asyncio.Future[_Result]:
    """Run ``work`` in a thread of its own; the future has what it returns or raises.

    Cancelling the future does not end the thread; to wait for the thread without owning it, use ``asyncio.wait``.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()

    def settle(result: _Result | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # None only where the work returns None

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - handed over whole to whoever awaits
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), name=name, daemon=True).start()
    return future
