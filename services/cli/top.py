"""``orca top``: the mesh at work, in the terminal."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.calls import told_plainly
from services.cli.connection import Connection, takes_connection
from shared.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from rich.console import Console

    from services.cli.top_view import MeshHistory
    from shared.mesh_view import MeshSnapshot

__all__ = ["top"]

_LEAVING = frozenset(b"qQ\x03\x04")
"""Keys that end it: q, and what Ctrl-C and Ctrl-D may send."""


@takes_connection
def top(
    connection: Connection,
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.25, max=10, metavar="SECONDS", help="Time between two frames.")
    ] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and leave.")] = False,
) -> None:
    """Watch the mesh work: iterations of each stage, K/V, queue, rates, workers. q leaves."""
    from rich.console import Console

    console = Console()
    if not once and not (console.is_terminal and sys.stdin.isatty()):
        raise ConfigError("orca top needs a terminal; --once prints one frame without one")
    with told_plainly(connection.address), contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_once(connection, interval, console) if once else _live(connection, interval, console))


async def _once(connection: Connection, interval_s: float, console: "Console") -> None:
    from services.cli.top_view import Frame, MeshHistory

    history = MeshHistory()
    async with connection.open_async() as client, contextlib.aclosing(client.watch(interval_s)) as snapshots:
        history.add(await anext(snapshots))
        with contextlib.suppress(StopAsyncIteration):
            history.add(await anext(snapshots))  # rates are there from the second one on
    console.print(Frame(history))


async def _live(connection: Connection, interval_s: float, console: "Console") -> None:
    from rich.live import Live

    from services.cli.top_view import Frame, MeshHistory

    history = MeshHistory()
    async with connection.open_async() as client, contextlib.aclosing(client.watch(interval_s)) as snapshots:
        # Who cannot be reached at all is told before the screen is taken.
        history.add(await anext(snapshots))
        with Live(Frame(history), console=console, screen=True, auto_refresh=False) as live:
            live.refresh()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None) as showing:
                    with _terminal(leave=lambda: showing.reschedule(0), resized=live.refresh):
                        await _draw(snapshots, history, live.refresh)
                        while True:
                            await asyncio.sleep(interval_s)
                            async with contextlib.aclosing(client.watch(interval_s)) as again:
                                await _draw(again, history, live.refresh)


async def _draw(
    snapshots: "AsyncGenerator[MeshSnapshot, None]", history: "MeshHistory", refresh: Callable[[], None]
) -> None:
    """Draw a frame for each snapshot, until there are no more for the time being."""
    try:
        async for snapshot in snapshots:
            history.add(snapshot)
            refresh()
        history.trouble = "the gateway is leaving"
    except UnavailableError as lost:
        history.trouble = str(lost)
    refresh()


@contextlib.contextmanager
def _terminal(leave: Callable[[], None], resized: Callable[[], None]) -> Iterator[None]:
    """Call ``leave`` when a key asks for it, and ``resized`` when the terminal has another size."""
    import termios
    import tty

    loop = asyncio.get_running_loop()
    keyboard = sys.stdin.fileno()

    def pressed() -> None:
        keys = os.read(keyboard, 64)
        if not keys or _LEAVING.intersection(keys):
            leave()

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, pressed)
    loop.add_signal_handler(signal.SIGWINCH, resized)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
