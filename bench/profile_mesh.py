"""A mesh at work, measured from outside: how long iterations take, and which thread of which process takes what of it.

A mesh decodes for N requests through the HTTP front. Once as many as fit one iteration have their first tokens, a
window of iterations is measured: the worker's own times of each, the CPU time of every thread, and when tokens reach
the client, which is this process. Knows processes and threads, not what they do inside. Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self
from urllib.parse import urlsplit

from services.mesh.local_mesh import LocalMesh, worker_name
from shared.errors import OrcaError
from shared.worker_client import fetch_timeline

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.mesh.options import MeshOptions

__all__ = [
    "MAX_ITERATIONS",
    "PROMPT_TOKENS",
    "LiveProfile",
    "Load",
    "Taken",
    "Thread",
    "by_role",
    "count_tokens",
    "profile_mesh",
]

PROMPT_TOKENS = 272
"""The mean of ORCA's trace (paper §6.2): 32 to 512."""

_FIRST_TOKENS = 6
"""Tokens that each request has before the window begins."""
_MAX_TOKENS = 1500
MAX_ITERATIONS = 1000
"""In a window: no request ends in it, even where the first had some hundred tokens before the last had one."""
_TOKEN = b'"text":'
"""A chunk of the stream has it once for each token."""
_SUCCESS = 200


@dataclass(frozen=True, slots=True)
class LiveProfile:
    """One window, microseconds an iteration: medians of the worker's and the client's times, means of CPU time."""

    num_requests: int
    batch_size: int
    num_iterations: int
    iteration_us: float
    """From the start of one to the start of the next: what a request waits for a token."""
    compute_us: float
    """From its start to its end on the compute thread."""
    gap_us: float
    """From the end of one to the start of the next."""
    ahead_us: float
    """From a control message's arrival to its start: how far the control plane is ahead."""
    token_interval_us: float
    """Between two tokens of a request at the client."""
    wall_us: float
    """Of the window, by its iterations."""
    num_cpus: int
    cpu_us: dict[str, float]
    """CPU time of the threads of each role: "worker: compute", "scheduler: event loop", "gateway: other threads" …"""
    cpu_wait_us: dict[str, float]
    """How long the same were ready to run and had no core."""


async def profile_mesh(num_requests: int, num_iterations: int, options: MeshOptions) -> LiveProfile:
    """Measure at least ``num_iterations`` iterations with ``num_requests`` in flight."""
    async with LocalMesh(options) as mesh:
        batch_size = min(num_requests, options.engine.scheduling.max_batch_size)
        pids = {name: process.pid for name, process in mesh.processes.items()} | {"client": os.getpid()}
        pids["worker"] = pids.pop(worker_name(0, 0))
        async with Load(mesh.http_address, num_requests) as load:
            await load.until(_FIRST_TOKENS, batch_size)
            before, began_ns = _read_threads(pids), time.monotonic_ns()
            await load.until(load.most_tokens + num_iterations, 1)
            after, ended_ns = _read_threads(pids), time.monotonic_ns()
            timings = await fetch_timeline(mesh.worker_addresses[0, 0])
    steps = [step for step in timings if began_ns <= step.started_ns <= ended_ns]
    cpu_us, cpu_wait_us = by_role(before, after, len(steps))
    return LiveProfile(
        num_requests=num_requests,
        batch_size=batch_size,
        num_iterations=len(steps),
        iteration_us=_median_us(later.started_ns - earlier.started_ns for earlier, later in pairwise(steps)),
        compute_us=_median_us(step.ended_ns - step.started_ns for step in steps),
        gap_us=_median_us(later.started_ns - earlier.ended_ns for earlier, later in pairwise(steps)),
        ahead_us=_median_us(step.started_ns - step.received_ns for step in steps),
        token_interval_us=_median_us(load.intervals(began_ns, ended_ns)),
        wall_us=1e-3 * (ended_ns - began_ns) / len(steps),
        num_cpus=len(os.sched_getaffinity(0)),
        cpu_us=cpu_us,
        cpu_wait_us=cpu_wait_us,
    )


class Load:
    """Requests in flight until the block ends; only their tokens are counted, so that the client takes little."""

    def __init__(self, url: str, num_requests: int) -> None:
        self._url = urlsplit(url)
        self._arrivals: list[list[int]] = [[] for _ in range(num_requests)]
        self._news = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._read(index)) for index in range(len(self._arrivals))]
        for task in self._tasks:
            task.add_done_callback(lambda _task: self._news.set())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def most_tokens(self) -> int:
        """Tokens of the request that has most."""
        return max(map(len, self._arrivals))

    async def until(self, num_tokens: int, num_requests: int) -> None:
        """Wait until so many requests have so many tokens each. Raises what made one of them end before."""
        while sum(len(arrivals) >= num_tokens for arrivals in self._arrivals) < num_requests:
            for task, arrivals in zip(self._tasks, self._arrivals, strict=True):
                if task.done():
                    task.result()  # raises what it has raised
                    raise OrcaError(f"a request has ended after {len(arrivals)} tokens, while others were measured")
            self._news.clear()
            await self._news.wait()

    def intervals(self, began_ns: int, ended_ns: int) -> list[int]:
        """Return the times between two tokens of a request within the window, nanoseconds."""
        return [
            later - earlier
            for arrivals in self._arrivals
            for earlier, later in pairwise(arrivals)
            if began_ns <= earlier and later <= ended_ns
        ]

    async def _read(self, index: int) -> None:
        rng = random.Random(index)
        prompt = [rng.randrange(100, 49000) for _ in range(PROMPT_TOKENS)]
        options = {"max_tokens": _MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        body = json.dumps({"prompt": prompt, **options}).encode()
        assert self._url.hostname is not None
        reader, writer = await asyncio.open_connection(self._url.hostname, self._url.port)
        with contextlib.closing(writer):
            writer.write(
                f"POST /v1/completions HTTP/1.1\r\nHost: {self._url.netloc}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                + body
            )
            status = await reader.readline()
            if not status.startswith(b"HTTP/1.1 %d " % _SUCCESS):
                answer = status + await reader.read(1 << 12)
                raise OrcaError(f"the server refuses a request: {answer.decode(errors='replace')}")
            tail = b""
            while chunk := await reader.read(1 << 16):
                num_tokens, tail = count_tokens(tail, chunk)
                self._arrivals[index] += [time.monotonic_ns()] * num_tokens
                self._news.set()


def count_tokens(tail: bytes, chunk: bytes) -> tuple[int, bytes]:
    """Return how many tokens the next chunk of a stream completes, and the tail to give with the one after it."""
    seen = tail + chunk
    return seen.count(_TOKEN), seen[1 - len(_TOKEN) :]  # which may be the first part of a mark, never a whole one


class Thread(NamedTuple):
    """One thread of one of the mesh's processes."""

    process: str
    thread_id: int
    is_main: bool
    name: str


class Taken(NamedTuple):
    """What a thread has had since it began, nanoseconds."""

    busy_ns: int
    waited_ns: int


def _read_threads(pids: dict[str, int]) -> dict[Thread, Taken]:
    """Read what every thread has taken so far, from Linux's /proc/…/schedstat."""
    found = {}
    for process, pid in pids.items():
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                busy, waited, _ = map(int, (task / "schedstat").read_text().split())
                name = (task / "comm").read_text().strip()
                found[Thread(process, int(task.name), task.name == str(pid), name)] = Taken(busy, waited)
    return found


def by_role(
    before: dict[Thread, Taken], after: dict[Thread, Taken], num_iterations: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return what threads took in between, by role, microseconds an iteration: of a core, and waiting for one."""
    busy_us: dict[str, float] = {}
    waited_us: dict[str, float] = {}
    for thread, taken in after.items():
        since = before.get(thread, Taken(0, 0))
        busy = 1e-3 * (taken.busy_ns - since.busy_ns) / num_iterations
        role = f"{thread.process}: {_role(thread, busy)}"
        busy_us[role] = busy_us.get(role, 0.0) + busy
        waited_us[role] = waited_us.get(role, 0.0) + 1e-3 * (taken.waited_ns - since.waited_ns) / num_iterations
    return busy_us, waited_us


_COMPUTES_US = 500
"""The worker's other threads, gRPC's own above all, take far less of an iteration."""


def _role(thread: Thread, busy_us: float) -> str:
    if thread.is_main:
        return "event loop"
    return "compute" if thread.process == "worker" and busy_us > _COMPUTES_US else "other threads"


def _median_us(times_ns: Iterable[int]) -> float:
    return 1e-3 * statistics.median(times_ns)
