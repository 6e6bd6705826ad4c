"""A benchmark as a whole: warm-up, levels, what watches it, and `orca bench serve` as a process."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from bench.comparison.systems import OpenAiServer, Workload
from bench.load.benchmark import BenchmarkConfig, LoadLevel, run_benchmark
from bench.load.endpoint import Endpoint, ServedModel
from bench.load.request_options import RequestOptions
from bench.load.traces import LengthRange, TraceConfig, TraceName, TraceRequest
from shared.errors import OrcaError
from tests.fakes.fake_openai import Exchange, FakeOpenAi, stream, text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from bench.load.records import RequestRecord

LEVELS = [LoadLevel(None, 1), LoadLevel(None, 2), LoadLevel(1000.0)]


@pytest.fixture
async def server() -> AsyncIterator[FakeOpenAi]:
    async with FakeOpenAi().serving() as server:
        yield server


@dataclass
class Watcher:
    """What an observer is told."""

    runs: list[tuple[str, int]] = field(default_factory=list)
    ended: list[RequestRecord] = field(default_factory=list)

    def run_started(self, level: LoadLevel, num_requests: int) -> None:
        self.runs.append((str(level), num_requests))

    def request_ended(self, record: RequestRecord) -> None:
        self.ended.append(record)


def config(server: FakeOpenAi, *, num_warmups: int = 2) -> BenchmarkConfig:
    return BenchmarkConfig(
        endpoint=Endpoint.parse(server.url),
        options=RequestOptions("tiny"),
        trace=TraceConfig.of(TraceName.ORCA, num_requests=5, seed=3, output_len=LengthRange(1, 5)),
        vocab_size=300,
        levels=LEVELS,
        num_warmups=num_warmups,
        timeout_s=10,
    )


async def test_each_level_is_a_run_with_prompts_of_its_own(server: FakeOpenAi) -> None:
    watcher = Watcher()
    benchmark = await run_benchmark(config(server), watcher, asyncio.Event())
    assert watcher.runs == [("1 in flight", 5), ("2 in flight", 5), ("1000 requests/s", 5)]
    assert [run.summary.num_ok for run in benchmark.runs] == [5, 5, 5]
    assert [run.seed for run in benchmark.runs] == [3, 4, 5]
    assert len(watcher.ended) == 15, "warm-ups are not told of"
    prompts = [tuple(asked.body["prompt"]) for asked in server.asked]
    assert len(prompts) == len(set(prompts)) == 17


class Burner(Watcher):
    """A watcher that takes a known time of a core for each request."""

    SHARE_S = 0.02

    def request_ended(self, record: RequestRecord) -> None:
        super().request_ended(record)
        burn(self.SHARE_S)


def burn(seconds: float) -> None:
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass


async def test_the_client_s_own_cores_are_counted(server: FakeOpenAi) -> None:
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    benchmark = await run_benchmark(
        replace(config(server, num_warmups=0), levels=LEVELS[:1]), Burner(), asyncio.Event()
    )
    duration_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_began_s
    (run,) = benchmark.runs
    assert run.client_cpu * duration_s >= 5 * Burner.SHARE_S
    assert run.client_cpu * run.summary.duration_s <= cpu_s


class StartedServer:
    """Stands for a peer's `Server`; its start takes time of this process's core."""

    is_started = False

    def __init__(self, url: str) -> None:
        self.endpoint = Endpoint.parse(url)

    async def start(self, timeout_s: float) -> ServedModel:
        burn(0.5)
        return ServedModel("tiny")

    async def stop(self) -> None:
        pass


async def test_of_a_comparison_s_client_only_the_run_counts(server: FakeOpenAi) -> None:
    warmup, trace = ((TraceRequest((number,), 2),) for number in (1, 2))

    async def script(exchange: Exchange) -> None:
        burn(0.5 if exchange.body["prompt"] == [1] else 0.05)
        await stream(exchange)

    server.script = script
    started: Any = StartedServer(server.url)
    system = OpenAiServer("a peer", "a product", {}, {}, started, is_kept=False)
    measurement = await system.measure(Workload(warmup, trace, 1))
    assert [record.num_prompt_tokens for record in measurement.records] == [1]
    assert measurement.client_cpu_s is not None
    assert 0.05 <= measurement.client_cpu_s < 0.5


async def test_the_same_benchmark_asks_the_same(server: FakeOpenAi) -> None:
    for _ in range(2):
        await run_benchmark(config(server), Watcher(), asyncio.Event())
    prompts = sorted(tuple(asked.body["prompt"]) for asked in server.asked)
    assert prompts[::2] == prompts[1::2]


async def test_a_warm_up_that_fails_ends_it(server: FakeOpenAi) -> None:
    server.script = lambda exchange: exchange.answer(400, b'{"error": {"message": "prompts must be text"}}')
    watcher = Watcher()
    with pytest.raises(OrcaError, match="a warm-up request failed: HTTP 400: prompts must be text"):
        await run_benchmark(config(server), watcher, asyncio.Event())
    assert watcher.runs == []
    benchmark = await run_benchmark(config(server, num_warmups=0), watcher, asyncio.Event())
    assert [run.summary.num_failed for run in benchmark.runs] == [5, 5, 5], "without one, failures are counted"


async def test_once_stopped_no_other_run_begins(server: FakeOpenAi) -> None:
    stop = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        if len(server.asked) == 9:  # two warm-ups, a run, the second request of the next one
            stop.set()
        await stream(exchange)

    server.script = script
    benchmark = await run_benchmark(config(server), Watcher(), stop)
    assert [run.was_stopped for run in benchmark.runs] == [False, True]
    assert benchmark.runs[1].summary.num_ok < 5


async def orca(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "bench", "serve", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), err.decode()


async def test_the_command_prints_tables_and_writes_reports(server: FakeOpenAi, tmp_path: Path) -> None:
    reports = [tmp_path / name for name in ("report.json", "report.png")]
    options = ["-u", server.url, "-n", "6", "-c", "1,2", "--output-len", "2-4", "--goodput", "ttft:60000"]
    for report in reports:
        options += ["--report", str(report)]
    exit_code, out, err = await ended(await orca(*options, "--label", "before"))
    assert (exit_code, err) == (0, "1 in flight: 6 requests\n2 in flight: 6 requests\n")
    for line in ("requests    6 ok", "100.0% of requests (ttft:60000 ms)", "time to first token (TTFT)", "norm. p50"):
        assert line in out
    found = json.loads(reports[0].read_text())
    assert (found["label"], found["endpoint"]["model"], found["trace"]["vocab_size"]) == ("before", "tiny", 300)
    assert [run["num_ok"] for run in found["runs"]] == [6, 6]
    assert reports[1].read_bytes().startswith(b"\x89PNG")


async def test_requests_that_fail_are_shown_and_make_it_fail(server: FakeOpenAi) -> None:
    async def script(exchange: Exchange) -> None:
        if len(server.asked) % 2:
            await stream(exchange)
        else:
            await exchange.answer(429, b'{"error": {"message": "the [queue] is full"}}')

    server.script = script
    exit_code, out, _ = await ended(await orca("-u", server.url, "-n", "4", "-c", "1"))
    assert exit_code == 1
    assert "2 ok, 2 failed" in out
    assert "2 × HTTP 429: the [queue] is full" in out


async def test_ctrl_c_reports_what_there_is(server: FakeOpenAi) -> None:
    hangs = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        if len(server.asked) <= 3:  # the warm-up is one of them
            await stream(exchange)
            return
        await exchange.events(text("a"))
        hangs.set()
        await exchange.left()

    server.script = script
    process = await orca("-u", server.url, "-n", "9", "-c", "1,2", "--json", "--save-detailed")
    await asyncio.wait_for(hangs.wait(), 30)
    process.send_signal(signal.SIGINT)
    exit_code, out, err = await ended(process)
    assert (exit_code, err) == (130, "")
    (run,) = json.loads(out)["runs"]
    assert (run["num_ok"], run["num_cancelled"], run["was_stopped"]) == (2, 1, True)
    assert [request["outcome"] for request in run["requests"]] == ["ok", "ok", "cancelled"]


@pytest.mark.parametrize(
    ("options", "exit_code", "said"),
    [
        (["--base-url", "127.0.0.1"], 2, "error: '127.0.0.1' is no endpoint: write for example http://127.0.0.1:8000"),
        (["--model", "other"], 1, "serves no model 'other'; it has: tiny"),
        (["--goodput", "speed:5"], 2, "is not METRIC:MILLISECONDS"),
        (["--input-len", "5-"], 2, "is not a whole number"),
        (["--input-len", "9-5"], 2, "write LOW-HIGH"),
        (["--request-rate", "1,fast"], 2, "'fast' is not a number"),
        (["--max-concurrency", "0"], 2, "is not a whole number from 1"),
        (["--report", "report.txt"], 2, "ends neither in .json nor in .png"),
        (["--report", "/nowhere/report.json"], 2, "its folder is not there"),
        (["--extra-body", "[1]"], 2, "it is not a JSON object"),
        (["--extra-body", "{"], 2, "it is not JSON"),
        (["--api", "chat", "--prompt-format", "token-ids"], 2, "give --prompt-format text"),
        (["--trace", "sharegpt-like"], 2, "have up to 2048 tokens, the context of tiny has 1000"),
        (["--trace", "fixed", "--input-len", "1-2"], 2, "is one number, not 1-2"),
        (["--tls-ca", "ca.pem"], 2, "http:// is without TLS"),
    ],
)
async def test_what_cannot_work_is_told_plainly(
    server: FakeOpenAi, options: list[str], exit_code: int, said: str
) -> None:
    found, out, err = await ended(await orca("-u", server.url, *options))
    assert (found, out) == (exit_code, "")
    assert said in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
    assert server.asked == []


async def test_a_vocabulary_that_nobody_tells_is_asked_for(server: FakeOpenAi) -> None:
    server.models = b'{"data": [{"id": "tiny"}]}'
    exit_code, _, err = await ended(await orca("-u", server.url))
    assert exit_code == 2
    assert "give --vocab-size, or --prompt-format text" in err
    assert (await ended(await orca("-u", server.url, "-n", "2", "--vocab-size", "90")))[0] == 0
    assert (await ended(await orca("-u", server.url, "-n", "2", "--prompt-format", "text")))[0] == 0
    prompts = [asked.body["prompt"] for asked in server.asked]
    assert max(token_id for prompt in prompts[:3] for token_id in prompt) < 90
    assert all(isinstance(prompt, str) for prompt in prompts[3:])
