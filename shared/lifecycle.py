"""The life of a service's process: event loop, signals, drain, exit code.

Every service is a coroutine that gets a ``Shutdown`` and returns when it has drained. SIGTERM and SIGINT ask it to
leave; a second signal ends it at once. ``LEAVE_NOW`` asks it to leave without grace: what it has under way fails, and
its clients are told. With ``exit_with_parent`` the end of standard input asks too: the supervisor holds the other end
of that pipe, so its death, by whatever cause, takes its children along.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, NoReturn

from shared.errors import OrcaError
from shared.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["LEAVE_NOW", "Shutdown", "new_event_loop", "run_service"]

LEAVE_NOW = signal.SIGUSR1

_EXIT_MARGIN_S = 5.0
"""A service ends its own drain after the grace time; one that hangs is ended this much later."""


class Shutdown:
    """The wish that this process leaves, and how long it may take."""

    def __init__(self, grace_s: float, on_request: Callable[[], None] | None = None) -> None:
        self.grace_s = grace_s
        self._on_request = on_request
        self._requested = asyncio.Event()
        self._deadline_s = math.inf
        self.reason = ""

    @property
    def requested(self) -> bool:
        """True once somebody asked."""
        return self._requested.is_set()

    def request(self, reason: str, grace_s: float | None = None) -> None:
        """Ask the service to leave, within ``grace_s`` where it is given; only the first wish is kept."""
        if not self._requested.is_set():
            self.reason = reason
            self.grace_s = self.grace_s if grace_s is None else grace_s
            self._deadline_s = time.monotonic() + self.grace_s
            self._requested.set()
            if self._on_request is not None:
                self._on_request()

    @property
    def remaining_s(self) -> float:
        """What is left of the grace time; all of it before somebody asks."""
        return min(self.grace_s, max(0.0, self._deadline_s - time.monotonic()))

    async def wait(self) -> None:
        """Wait until somebody asks."""
        await self._requested.wait()


def run_service(
    main: Callable[[Shutdown], Awaitable[None]], *, grace_s: float = 10.0, exit_with_parent: bool = False
) -> NoReturn:
    """Run ``main`` until it returns, on a uvloop where there is one, then end the process.

    Exit code 0: it left as asked. 1: it failed, and the cause has been logged as one event.
    """
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            exit_code = runner.run(_serve(main, grace_s, exit_with_parent))
    except KeyboardInterrupt:
        exit_code = 130
    _end_process(exit_code)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a uvloop, or the standard library's loop where there is none."""
    try:
        import uvloop
    except ImportError:  # it is not to be had on every platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _serve(main: Callable[[Shutdown], Awaitable[None]], grace_s: float, exit_with_parent: bool) -> int:
    loop = asyncio.get_running_loop()
    shutdown = Shutdown(grace_s, lambda: _exit_by_force_after(grace_s + _EXIT_MARGIN_S))

    def on_signal(number: signal.Signals) -> None:
        if shutdown.requested:
            os._exit(128 + number)
        shutdown.request(number.name)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    loop.add_signal_handler(LEAVE_NOW, shutdown.request, LEAVE_NOW.name, 0.0)
    if exit_with_parent:
        await loop.connect_read_pipe(lambda: _ParentWatch(shutdown), sys.stdin)
    exit_code = 0
    try:
        await main(shutdown)
    except* OrcaError as group:
        exit_code = 1
        for error in _leaves(group):
            get_logger().error("service_failed", error=type(error).__name__, message=str(error))
    except* Exception as group:  # noqa: BLE001 - the last place before the process ends
        exit_code = 1
        get_logger().error("service_failed", error="unexpected", exc_info=group)
    if exit_code == 0:
        get_logger().info("service_stopped", reason=shutdown.reason or "done")
    return exit_code


def _end_process(exit_code: int) -> NoReturn:
    """Leave without tearing the interpreter down.

    All that matters has been given back by now, and libraries' threads that are held in a call of theirs (a collective,
    a compile) may keep a finalization from ever ending, when no timer of ours runs any more.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(exit_code)


def _exit_by_force_after(duration_s: float) -> None:
    """The last resort, for a drain or a thread that hangs."""
    timer = threading.Timer(duration_s, os._exit, [1])
    timer.daemon = True
    timer.start()


def _leaves(group: BaseExceptionGroup[OrcaError]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


class _ParentWatch(asyncio.Protocol):
    """Asks for shutdown when the other end of standard input closes."""

    def __init__(self, shutdown: Shutdown) -> None:
        self._shutdown = shutdown

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._shutdown.request("parent_gone")
