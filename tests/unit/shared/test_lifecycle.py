"""The life of a process, seen from outside: signals, exit codes, the end of the parent."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from shared.lifecycle import LEAVE_NOW, Shutdown

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = """
import asyncio, threading
from shared.errors import ModelError
from shared.lifecycle import run_service
from shared.log import configure_logging, get_logger

configure_logging(service="test")

async def main(shutdown):
    get_logger().info("up")
    {body}

run_service(main, exit_with_parent={exit_with_parent})
"""


@contextmanager
def service(body: str, *, exit_with_parent: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process that has come up."""
    script = PROGRAM.format(body=body, exit_with_parent=exit_with_parent)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            assert json.loads(process.stderr.readline())["event"] == "up"
            yield process
        finally:
            process.kill()


def last_event(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stderr is not None
    event: dict[str, Any] = json.loads(process.stderr.read().splitlines()[-1])
    return event


def test_it_may_be_asked_to_leave_without_grace() -> None:
    body = 'await shutdown.wait(); get_logger().info("left", grace_s=shutdown.grace_s)'
    with service(body) as process:
        process.send_signal(LEAVE_NOW)
        assert process.stderr is not None
        assert json.loads(process.stderr.readline())["grace_s"] == 0
        assert process.wait(10) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_it_to_leave(number: signal.Signals) -> None:
    with service("await shutdown.wait()") as process:
        process.send_signal(number)
        event = last_event(process)
        assert process.wait(10) == 0
        assert (event["event"], event["reason"]) == ("service_stopped", number.name)


def test_a_second_signal_ends_it_at_once() -> None:
    body = "await shutdown.wait(); get_logger().info('draining'); await asyncio.Event().wait()"
    with service(body) as process:
        process.terminate()
        assert process.stderr is not None
        assert json.loads(process.stderr.readline())["event"] == "draining"
        process.terminate()
        assert process.wait(10) == 128 + signal.SIGTERM


def test_it_leaves_with_its_parent() -> None:
    with service("await shutdown.wait()", exit_with_parent=True) as process:
        assert process.stdin is not None
        process.stdin.close()
        event = last_event(process)
        assert process.wait(10) == 0
        assert (event["event"], event["reason"]) == ("service_stopped", "parent_gone")


def test_without_the_option_standard_input_means_nothing() -> None:
    with service("await shutdown.wait()") as process:
        assert process.stdin is not None
        process.stdin.close()
        process.terminate()
        assert last_event(process)["reason"] == "SIGTERM"
        assert process.wait(10) == 0


def test_it_may_end_by_itself() -> None:
    with service("return") as process:
        assert last_event(process)["reason"] == "done"
        assert process.wait(10) == 0


def test_a_thread_that_never_ends_does_not_keep_it() -> None:
    with service("threading.Thread(target=threading.Event().wait).start()") as process:
        assert last_event(process)["event"] == "service_stopped"
        assert process.wait(10) == 0


def test_an_error_of_ours_is_one_event_without_a_traceback() -> None:
    with service("raise ModelError('no such file; name another')") as process:
        event = last_event(process)
        assert process.wait(10) == 1
        assert (event["event"], event["error"]) == ("service_failed", "ModelError")
        assert event["message"] == "no such file; name another"
        assert "exception" not in event


def test_an_error_out_of_a_task_group_is_the_same() -> None:
    body = """
    async with asyncio.TaskGroup() as tasks:
        async def fail():
            raise ModelError("inside")
        tasks.create_task(fail())
        await asyncio.Event().wait()
"""
    with service(body) as process:
        event = last_event(process)
        assert process.wait(10) == 1
        assert event["message"] == "inside"


def test_an_error_that_nobody_expected_has_its_traceback() -> None:
    with service("raise KeyError('surprise')") as process:
        event = last_event(process)
        assert process.wait(10) == 1
        assert (event["event"], event["error"]) == ("service_failed", "unexpected")
        assert "KeyError: 'surprise'" in event["exception"]


async def test_only_the_first_reason_is_kept() -> None:
    shutdown = Shutdown(grace_s=1)
    assert (shutdown.requested, shutdown.reason) == (False, "")
    shutdown.request("one")
    shutdown.request("two")
    await shutdown.wait()
    assert (shutdown.requested, shutdown.reason) == (True, "one")
