"""An event loop in a thread of its own, so that programs without asyncio can use what needs it.

Whoever waits does so in a queue of the C library's, which Ctrl-C may interrupt at any point. (gRPC's own blocking calls
may not: an interrupt can leave a lock of the library taken, and the next call then waits for ever.)
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from shared.errors import OrcaError, UnavailableError
from shared.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine
    from types import TracebackType
    from typing import Any

__all__ = ["BackgroundLoop", "Stream"]

_News = TypeVar("_News")
_Result = TypeVar("_Result")

_WINDOW = 64
"""How far a stream may be ahead of its reader."""

_LOOK_EVERY_S = 1.0
"""How often one who waits sees to signals that came in between."""


class BackgroundLoop:
    """Runs coroutines for any thread; ``close`` ends it, and cancels what is running."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.RLock()
        self._is_closed = False
        self._running: set[asyncio.Task[None]] = set()
        # A daemon: a program that forgets to close must still end.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """Run a coroutine function and return its result. Errors: its own; ``UnavailableError`` of a closed loop."""
        with self.stream(_once(work)) as results:
            return next(results)

    def stream(self, start: Callable[[], AsyncGenerator[_News, None]]) -> Stream[_News]:
        """Run an asynchronous generator, from now on. Raises ``UnavailableError`` where the loop is closed."""
        pump = _Pump(start)
        self.post(lambda: self._begin(pump))
        return Stream(pump, self)

    def post(self, callback: Callable[[], object]) -> None:
        """Have a function called in the loop's thread. Raises ``UnavailableError`` where the loop is closed."""
        with self._lock:
            if self._is_closed:
                raise UnavailableError("this client is closed; open another one")
            self._loop.call_soon_threadsafe(callback)

    def cancel(self, pump: _Pump[Any]) -> None:
        """Cancel what a pump runs; takes no lock, since a garbage collector may call it anywhere."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and all has been cancelled
            self._loop.call_soon_threadsafe(pump.cancel)

    def close(self, at_end: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel what is running, run ``at_end``, and end the thread; further calls do nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            ending = self._end(at_end)
            # What was posted before comes first, so that nobody waits for something that is never started.
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(ending))
        self._thread.join()
        self._loop.close()

    def _begin(self, pump: _Pump[Any]) -> None:
        pump.task = self._loop.create_task(pump.run())
        self._running.add(pump.task)
        pump.task.add_done_callback(self._running.discard)
        pump.task.add_done_callback(pump.end)

    async def _end(self, at_end: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        try:
            if at_end is not None:
                await at_end()
        finally:
            self._loop.stop()


class Stream(Generic[_News]):
    """What a call that is running tells; iterate over it once, in one thread.

    Closing it, leaving its ``with`` block or dropping it before its end cancels the call, and the request with it. Any
    thread may close it: one that waits for news then gets an ``OrcaError`` with the code CANCELLED.
    """

    def __init__(self, pump: _Pump[_News], loop: BackgroundLoop) -> None:
        self._pump = pump
        self._loop = loop
        self._num_taken = 0
        self._is_over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _News:
        """Wait for news. Errors: those of the client's method."""
        if self._is_over:
            raise StopIteration
        try:
            news = self._pump.take()
        except Exception:  # StopIteration is one
            self._is_over = True
            raise
        self._num_taken += 1
        if self._num_taken % (_WINDOW // 2) == 0:
            with contextlib.suppress(UnavailableError):
                self._loop.post(self._pump.go_on)
        return news

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._loop.cancel(self._pump)

    def close(self) -> None:
        """Cancel the call where it is still running; there is no more news."""
        self._is_over = True
        self._loop.cancel(self._pump)


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


class _Pump(Generic[_News]):
    """Carries what a generator yields from the loop's thread to the one that waits, a window ahead at most."""

    def __init__(self, start: Callable[[], AsyncGenerator[_News, None]]) -> None:
        self.task: asyncio.Task[None] | None = None
        self._start = start
        self._news: queue.SimpleQueue[_News | _End] = queue.SimpleQueue()
        self._window = asyncio.Semaphore(_WINDOW)

    async def run(self) -> None:
        """Carry all of it; in the loop's thread, as the next three."""
        async with contextlib.aclosing(self._start()) as generator:
            async for news in generator:
                await self._window.acquire()
                self._news.put(news)

    def end(self, task: asyncio.Task[None]) -> None:
        """Tell how it ended, also where it was cancelled before it began."""
        self._news.put(_End(_cancelled() if task.cancelled() else task.exception()))

    def go_on(self) -> None:
        """Half of the window has been taken."""
        for _ in range(_WINDOW // 2):
            self._window.release()

    def cancel(self) -> None:
        """End at once."""
        if self.task is not None:
            self.task.cancel()

    def take(self) -> _News:
        """Wait; in any thread. Raises ``StopIteration`` at the end, or what ended it."""
        news = self._next()
        if not isinstance(news, _End):
            return news
        if news.error is None:
            raise StopIteration
        raise news.error

    def _next(self) -> _News | _End:
        while True:
            # A signal that comes just before the wait does not end it, so that Ctrl-C needs another look.
            with contextlib.suppress(queue.Empty):
                return self._news.get(timeout=_LOOK_EVERY_S)


def _cancelled() -> OrcaError:
    error = OrcaError("the call was cancelled by this client")
    error.code = StatusCode.CANCELLED
    return error


def _once(work: Callable[[], Coroutine[Any, Any, _Result]]) -> Callable[[], AsyncGenerator[_Result, None]]:
    async def generator() -> AsyncGenerator[_Result, None]:
        yield await work()

    return generator
