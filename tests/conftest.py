"""What holds for every test: nothing of it is left behind, neither process, thread nor task."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

THREAD_END_S = 2.0
"""Time for a thread that has been told to end."""

LIBRARY_THREADS = (
    "asyncio_",  # the event loop's own executor: joined when the loop closes, which is after this check
    "uvloop_",  # the same of the other loop
    "_poll_wrapper",  # gRPC's poller: one for all loops, until the process ends
)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a child process, a thread or a task."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("no_task_left_behind")
    processes = _children()
    threads = set(threading.enumerate())
    yield
    left = [process for process in _children() if process not in processes and not _is_child_of(process, processes)]
    for process in left:
        process.kill()
    assert not left, f"processes left behind: {left}"
    stray = [thread for thread in set(threading.enumerate()) - threads if not _belongs_to_a_library(thread)]
    for thread in stray:
        thread.join(THREAD_END_S)
    stray = [thread for thread in stray if thread.is_alive()]
    assert not stray, f"threads left behind: {stray}"


@pytest.fixture
async def no_task_left_behind() -> AsyncIterator[None]:
    """Fail a test whose tasks are still there after it and its fixtures have ended."""
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        # A task that has been cancelled, or whose last step is due, may end within this turn of the loop.
        await asyncio.wait(left, timeout=0.1)
    left = {task for task in left if not task.done()}
    assert not left, f"tasks left behind: {left}"


def _children() -> set[psutil.Process]:
    if not _has_children():  # the usual case: all processes of the machine need not be looked through
        return set()
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                found.add(process)
        except psutil.NoSuchProcess:  # gone between the two looks
            continue
        except psutil.ZombieProcess:
            found.add(process)
    return found


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _is_child_of(process: psutil.Process, others: set[psutil.Process]) -> bool:
    """Whether one of ``others``, which the test found there, has started the process."""
    try:
        return not others.isdisjoint(process.parents())
    except psutil.NoSuchProcess:
        return True


def _belongs_to_a_library(thread: threading.Thread) -> bool:
    return any(mark in thread.name for mark in LIBRARY_THREADS)
