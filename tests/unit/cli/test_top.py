"""``orca top``: frames to the letter, and the terminal it is drawn in."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import signal
import termios
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self, cast

import pytest
from rich.console import Console

from services.cli import top
from services.cli.top_view import Frame, MeshHistory
from shared.errors import UnavailableError
from shared.ids import StepId
from shared.mesh_view import StageTimeline
from shared.messages import StepTiming
from tests.fakes.fake_watch import BUSY, not_ready

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from services.cli.connection import Connection
    from shared.mesh_view import MeshSnapshot
    from tests.unit.cli.conftest import Outcome  # only for the type checker

FRAME = """\
orca top  ● ready  synthetic: · 2 stages × 1 rank · float32

output        120 tok/s                                                                  █
prefill       7.2 tok/s                                                                  █
iteration   20.0 ms · 40 / s · batch of 3 requests · 12 tokens · 2 in flight

stage 0   ▅█▅█▅█▅▇▆▅█▅█▅▁▅▇▆▅█▅█▅█▅▇▆▅▁▅█▅█▅▇▆▅█▅█▅█▅▇▆▅█▅█▅█▅▇▆▅█▅▁▅█▅▇▆▅█▅█▅█▅▇▁    79%
stage 1   ▁▁▅█▅█▅▇▆▅█▅█▅█▅▇▆▅█▅█▅█▅▇▆▅█▅▁▅█▅▇▆▅█▅█▅█▅▇▆▅█▅█▅█▅▇▆▅█▅█▅▁▅▇▆▅█▅█▅█▅▇▆    79%
batch     ███████████████████████████████████████████████████████████████████████     ≤ 3
          -1 s                       █ decode  █ prefill                       now

K/V       ████████████▒▒▒▒▒▒░░░░░░░░░░░░░░░░░░░  16 used · 8 cached · 24 free of 48 tokens
requests  3 running · 2 waiting (1 preempted) · 9 finished · 5 at this gateway

● stage 0 · rank 0  ready                  127.0.0.1:7001
● stage 1 · rank 0  loading: weights 40 %  127.0.0.1:7002
"""
"""Forty iterations of 20 ms in a second; each eighth has a prompt, which is seen where a slice is full."""


def drawn(history: MeshHistory, width: int = 90, *, styles: bool = False) -> str:
    console = Console(width=width, file=io.StringIO(), record=True, color_system="standard", force_terminal=True)
    console.print(Frame(history))
    return console.export_text(styles=styles)


def seen(*snapshots: MeshSnapshot) -> MeshHistory:
    history = MeshHistory()
    for snapshot in snapshots:
        history.add(snapshot)
    return history


def test_a_frame() -> None:
    assert [line.rstrip() for line in drawn(seen(BUSY)).splitlines()] == FRAME.splitlines()


@pytest.mark.parametrize("width", [30, 44, 80, 200])
def test_a_frame_is_as_wide_as_the_terminal(width: int) -> None:
    assert max(len(line) for line in drawn(seen(BUSY), width).splitlines()) <= width


def test_colours_tell_decode_from_prefill() -> None:
    def one(num_tokens: int, num_decode: int) -> str:
        step = StepTiming(StepId(0), 0, 0, BUSY.engine.taken_ns, 4, num_tokens, num_decode)
        engine = replace(BUSY.engine, stages=(StageTimeline(0, (step,)),))
        text = drawn(seen(replace(BUSY, engine=engine)), styles=True)
        return next(line for line in text.splitlines() if "stage 0" in line)

    assert "\x1b[36m█" in one(4, 4)
    assert "\x1b[33m█" in one(400, 0)
    assert "\x1b[36;43m▄" in one(8, 4), "half of each"


def test_rates_are_remembered_and_lanes_are_of_one_epoch() -> None:
    slower = replace(BUSY, engine=replace(BUSY.engine, output_tokens_per_s=30.1, stages=()))
    lines = drawn(seen(BUSY, slower, BUSY)).splitlines()
    assert lines[2].endswith("█▂█")
    history = seen(BUSY)
    again = replace(BUSY.engine, status=replace(BUSY.engine.status, epoch=3), stages=())
    history.add(replace(BUSY, engine=again))
    assert history.lanes == {}
    assert "iteration   none yet" in drawn(history)


def test_what_is_too_old_to_be_shown_is_forgotten() -> None:
    history = seen(BUSY)
    later = replace(BUSY.engine, taken_ns=BUSY.engine.taken_ns + 60 * 10**9, stages=(StageTimeline(0, ()),))
    history.add(replace(BUSY, engine=later))
    assert not history.lanes[0]


def test_a_mesh_that_does_not_serve_says_why() -> None:
    text = drawn(seen(not_ready("waiting for workers: stage 1 rank 0")))
    assert "● not ready" in text
    assert "waiting for workers: stage 1 rank 0" in text
    history = seen(BUSY)
    history.trouble = "gateway at h:1: Connection refused"
    assert "● lost" in drawn(history)
    assert "Connection refused" in drawn(history)


@dataclass
class FakeClient:
    """Stands for ``GatewayClient``: each watch is told one list of snapshots, or fails."""

    watches: list[list[MeshSnapshot | Exception]]
    intervals_s: list[float] = field(default_factory=list)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    """Everything has been told."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        pass

    async def watch(self, interval_s: float) -> AsyncGenerator[MeshSnapshot, None]:
        self.intervals_s.append(interval_s)
        if not self.watches:
            self.waiting.set()
            await asyncio.get_running_loop().create_future()
        for told in self.watches.pop(0):
            if isinstance(told, Exception):
                raise told
            yield told


@dataclass
class FakeConnection:
    client: FakeClient
    address: str = "127.0.0.1:50051"

    def open_async(self) -> FakeClient:
        return self.client


def test_once(orca: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    first = replace(BUSY, engine=replace(BUSY.engine, output_tokens_per_s=None, prefill_tokens_per_s=None, stages=()))
    client = FakeClient([[first, BUSY, BUSY]])
    monkeypatch.setattr("shared.client.GatewayClient", lambda *arguments, **options: client)
    monkeypatch.setenv("COLUMNS", "90")
    outcome = orca("top", "--once", "--interval", "0.25")
    assert outcome.exit_code == 0
    assert [line.rstrip() for line in outcome.out.splitlines()] == FRAME.splitlines()
    assert client.intervals_s == [0.25]


def test_nobody_there(orca: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient([[UnavailableError("gateway at h:1: failed to connect to all addresses")]])
    monkeypatch.setattr("shared.client.GatewayClient", lambda *arguments, **options: client)
    outcome = orca("top", "--once", "-a", "h:1")
    assert outcome.exit_code == 1
    assert outcome.err.startswith("error: no gateway answers at h:1")


def test_no_terminal(orca: Callable[..., Outcome]) -> None:
    outcome = orca("top")
    assert outcome.exit_code == 2
    assert "--once prints one frame" in outcome.err


def test_intervals_have_bounds(orca: Callable[..., Outcome]) -> None:
    assert orca("top", "--once", "--interval", "0.1").exit_code == 2


@dataclass
class Terminal:
    """A pseudo-terminal whose keyboard is ``sys.stdin``."""

    keyboard: int
    stdin: io.TextIOWrapper

    def press(self, keys: bytes) -> None:
        os.write(self.keyboard, keys)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        yield Terminal(ours, stdin)
    os.close(ours)


async def test_live_until_q(terminal: Terminal) -> None:
    client = FakeClient([[BUSY, not_ready("the engine is recovering"), UnavailableError("gateway gone")], [BUSY]])
    screen = Console(file=io.StringIO(), width=90, height=30, force_terminal=True, color_system=None)
    before = termios.tcgetattr(terminal.keyboard)
    showing = asyncio.ensure_future(
        top._live(cast("Connection", FakeConnection(client)), 0.01, screen)  # it shows what a user would see
    )
    await asyncio.wait_for(client.waiting.wait(), 10)
    os.kill(os.getpid(), signal.SIGWINCH)
    terminal.press(b"x")
    terminal.press(b"q")
    await asyncio.wait_for(showing, 10)
    assert termios.tcgetattr(terminal.keyboard) == before
    shown = cast("Any", screen.file).getvalue()
    for said in ("● ready", "the engine is recovering", "gateway gone", "the gateway is leaving"):
        assert said in shown
    assert client.intervals_s == [0.01] * 3
