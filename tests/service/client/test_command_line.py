"""`orca generate` and `orca chat` as processes of their own, on pipes and on a terminal, with a scripted gateway."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from shared.generation import ChatMessage, ChatRequest
from tests.fakes.fake_gateway import ANSWER, FakeGateway, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE_S = 30.0


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with serving(FakeGateway()) as gateway:
        yield gateway


class Terminal:
    """A command on a terminal: what it writes is kept, keys are typed."""

    def __init__(self, *command: str, environment: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "dumb", **environment}
        )
        os.close(slave)
        self.shown = ""
        self._num_taken = 0

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def until(self, pattern: str, *, patience_s: float = PATIENCE_S) -> None:
        """Wait until it has written this, after what was waited for before."""
        deadline = time.monotonic() + patience_s
        while (match := re.compile(pattern).search(self.shown, self._num_taken)) is None:
            readable, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise TimeoutError(f"{pattern!r} did not come in {self.shown!r}")
            self.shown += os.read(self._master, 4096).decode("utf-8", "replace")
        self._num_taken = match.end()

    def interrupt_prompt(self, pattern: str) -> None:
        """Press Ctrl-C at a prompt and wait for this.

        Python's readline notices a signal that comes between the prompt and its wait for a key only with the next one.
        """
        for _ in range(5):
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(TimeoutError):
                self.until(pattern, patience_s=5)
                return
        raise TimeoutError(f"{pattern!r} did not come in {self.shown!r}")

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self._master)


@contextlib.contextmanager
def chatting(gateway: FakeGateway, state: Path, *options: str) -> Iterator[Terminal]:
    command = (sys.executable, "-m", "services.cli", "chat", "--address", gateway.address, *options)
    terminal = Terminal(*command, environment={"XDG_STATE_HOME": str(state), "COLUMNS": "80"})
    try:
        terminal.until("tiny; /help tells")
        terminal.until("> ")
        yield terminal
    finally:
        terminal.close()


def questions(gateway: FakeGateway) -> list[str]:
    return [request.messages[-1].content for request in gateway.asked if isinstance(request, ChatRequest)]


def test_ctrl_c_cancels_the_request_at_the_gateway(gateway: FakeGateway) -> None:
    gateway.hangs = True
    command = [sys.executable, "-m", "services.cli", "generate", "x", "--address", gateway.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(len("Once más".encode())) == "Once más".encode()
        process.send_signal(signal.SIGINT)
        gateway.cancelled.get(timeout=PATIENCE_S)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_a_script_on_a_pipe(gateway: FakeGateway) -> None:
    command = [sys.executable, "-m", "services.cli", "chat", "--address", gateway.address]
    done = subprocess.run(
        command, input="/system be brief\nhällo\\\nworld\n", capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "Once más\n")
    (asked,) = gateway.asked
    assert isinstance(asked, ChatRequest)
    assert asked.messages == [ChatMessage("system", "be brief"), ChatMessage("user", "hällo\nworld")]


def test_bytes_that_are_no_text_end_a_script(gateway: FakeGateway) -> None:
    command = [sys.executable, "-m", "services.cli", "chat", "--address", gateway.address]
    done = subprocess.run(
        command, input=b"\xff\n", capture_output=True, check=False, timeout=60, env={**os.environ, "PYTHONUTF8": "0"}
    )
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: ")
    assert b"Traceback" not in done.stderr
    assert gateway.asked == []


def test_lines_are_edited_and_come_back_with_the_arrow_keys(gateway: FakeGateway, tmp_path: Path) -> None:
    with chatting(gateway, tmp_path) as terminal:
        terminal.type("worle\x7fd\x01hello \r")
        terminal.until("Once más")
        terminal.until("> ")
        terminal.type("/un\t\r")
        terminal.until("taken back; 0 messages are left")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.exit_code() == 0
    with chatting(gateway, tmp_path) as terminal:
        terminal.type("\x1b[A\x1b[A\r")
        terminal.until("Once más")
        terminal.until("> ")
        terminal.type("/quit\r")
        assert terminal.exit_code() == 0
    assert questions(gateway) == ["hello world", "hello world"]
    history = tmp_path / "orca" / "chat_history"
    assert [line.strip() for line in history.read_text().splitlines()] == [
        "hello world",
        "/undo",
        "hello world",
        "/quit",
    ]


def test_no_history(gateway: FakeGateway, tmp_path: Path) -> None:
    with chatting(gateway, tmp_path, "--no-history") as terminal:
        terminal.type("a secret\r")
        terminal.until("Once más")
        terminal.until("> ")
        terminal.type("/quit\r")
        assert terminal.exit_code() == 0
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_stops_an_answer_and_twice_it_leaves(gateway: FakeGateway, tmp_path: Path) -> None:
    gateway.hangs = True
    with chatting(gateway, tmp_path) as terminal:
        terminal.type("hello\r")
        terminal.until("Once más")
        terminal.process.send_signal(signal.SIGINT)
        gateway.cancelled.get(timeout=PATIENCE_S)
        terminal.until(r"\(stopped\)")
        terminal.until("> ")
        gateway.hangs = False
        terminal.type("go on\r")
        terminal.until("Once más")
        terminal.until("> ")
        terminal.interrupt_prompt("Ctrl-C again, Ctrl-D or /quit leaves")
        terminal.until("> ")
        with pytest.raises(OSError, match="Input/output error"):  # nobody writes to it any more
            terminal.interrupt_prompt("a next prompt, which never comes")
        assert terminal.exit_code() == 130
    last = gateway.asked[-1]
    assert isinstance(last, ChatRequest)
    answered = ChatMessage("assistant", "".join(delta.text for delta in ANSWER))
    assert last.messages == [ChatMessage("user", "hello"), answered, ChatMessage("user", "go on")]


def test_an_answer_cannot_steer_the_terminal(gateway: FakeGateway, tmp_path: Path) -> None:
    gateway.deltas = [*ANSWER[:1], *(type(ANSWER[1])("a\x1b]0;title\x07b", (5,)),), *ANSWER[1:]]
    with chatting(gateway, tmp_path) as terminal:
        terminal.type("hello\r")
        terminal.until("a␛]0;title␇bOnce más")
        terminal.until("> ")
        terminal.type("/quit\r")
        assert terminal.exit_code() == 0
