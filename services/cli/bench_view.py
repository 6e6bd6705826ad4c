"""A benchmark on the terminal: a progress bar on standard error while it runs, tables of its numbers afterwards."""

import asyncio
import contextlib
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from bench.load.records import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.load.benchmark import Benchmark, LoadLevel, Run
    from bench.load.metrics import Distribution
    from bench.load.records import RequestRecord

__all__ = ["BenchView"]

_REFRESHES_PER_S = 4
"""The bar is drawn on the cores that are measured."""
_BUSY_CLIENT = 0.8
"""Cores; above it the client may be what is slow."""
_MAX_FAILURES = 5


class BenchView:
    """What is shown of a benchmark, an `Observer` of it; ``stop`` ends it."""

    def __init__(self, *, is_quiet: bool) -> None:
        """``is_quiet``: standard output is for a program, and there is no bar either unless on a terminal."""
        self.stop = asyncio.Event()
        self._is_quiet = is_quiet
        self._console = Console()
        self._notes = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]:,} tokens"),
            TextColumn("{task.fields[failed]}", style="red"),
            TimeElapsedColumn(),
        )
        self._bar = Progress(
            *columns,
            console=self._notes,
            transient=True,
            disable=not self._notes.is_terminal,
            refresh_per_second=_REFRESHES_PER_S,
        )
        self._task = self._bar.add_task("warming up", total=None, tokens=0, failed="")
        self._num_tokens = self._num_failed = 0

    @property
    def was_stopped(self) -> bool:
        """Whether somebody has ended it."""
        return self.stop.is_set()

    @contextlib.contextmanager
    def watching(self) -> "Iterator[None]":
        """Show the bar for as long as the block lasts."""
        with self._bar:
            yield

    def run_started(self, level: "LoadLevel", num_requests: int) -> None:
        """Begin the bar again."""
        self._num_tokens = self._num_failed = 0
        self._bar.reset(self._task, total=num_requests, description=str(level), tokens=0, failed="")
        if not self._notes.is_terminal and not self._is_quiet:
            self._notes.print(f"{level}: {num_requests} requests", highlight=False)

    def request_ended(self, record: "RequestRecord") -> None:
        """Move the bar on."""
        self._num_tokens += record.num_output_tokens
        self._num_failed += record.outcome is Outcome.FAILED
        failed = f"{self._num_failed} failed" if self._num_failed else ""
        self._bar.update(self._task, advance=1, tokens=self._num_tokens, failed=failed)

    def show(self, benchmark: "Benchmark") -> None:
        """Print tables: each run in full, then all of them beside each other."""
        for run in benchmark.runs:
            self._show_run(run, benchmark)
        if len(benchmark.runs) > 1:
            self._console.print(_comparison(benchmark.runs))
        if not benchmark.runs:
            self._console.print("stopped before any run had begun")

    def _show_run(self, run: "Run", benchmark: "Benchmark") -> None:
        self._console.rule(Text(str(run.level)), style="dim")
        for part in (_facts(run, benchmark), _latencies(run)):
            self._console.print(part)
        for failure in run.summary.failures[:_MAX_FAILURES]:
            line = Text.assemble((f"{failure.num_requests} × ", "bold red"), failure.message)
            self._console.print(line, soft_wrap=True)
        if (others := len(run.summary.failures) - _MAX_FAILURES) > 0:
            self._console.print(f"and {others} other reasons, which a report lists")
        if run.client_cpu > _BUSY_CLIENT:
            self._console.print(
                f"This client took {run.client_cpu:.2f} of a core: it may have been the limit, not the server.",
                style="yellow",
                highlight=False,
            )
        self._console.print()


def _facts(run: "Run", benchmark: "Benchmark") -> Table:
    summary = run.summary
    counts = [f"{summary.num_ok:,} ok"]
    counts += [f"{summary.num_failed:,} failed"] if summary.num_failed else []
    counts += [f"{summary.num_cancelled:,} cut off by the end of the run"] if summary.num_cancelled else []
    counts += [f"{summary.num_short:,} shorter than asked for"] if summary.num_short else []
    rows = {
        "requests": Text(", ".join(counts) + (" (stopped)" if run.was_stopped else "")),
        "duration": Text(f"{summary.duration_s:.2f} s"),
        "tokens": Text(f"{summary.num_prompt_tokens:,} in, {summary.num_output_tokens:,} out"),
        "throughput": Text(
            f"{summary.output_tokens_per_s:,.1f} output tokens/s, {summary.input_tokens_per_s:,.1f} input tokens/s, "
            f"{summary.requests_per_s:,.3f} requests/s"
        ),
    }
    if summary.goodput_per_s is not None:
        bounds = ", ".join(map(str, benchmark.config.bounds))
        part = "" if summary.goodput_ratio is None else f", {summary.goodput_ratio:.1%} of requests"
        rows["goodput"] = Text(f"{summary.goodput_per_s:,.3f} requests/s{part} ({bounds} ms)")
    if summary.failures:
        rows["requests"].stylize("bold red")
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), value)
    return table


def _latencies(run: "Run") -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("latency, ms")
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    summary = run.summary
    rows = {
        "time to first token (TTFT)": summary.ttft,
        "time per output token (TPOT)": summary.tpot,
        "inter-token (ITL)": summary.itl,
        "end to end (E2E)": summary.e2e,
        "normalised, per output token": summary.normalised,
    }
    if run.level.request_rate is not None:
        rows["arrival to sending"] = summary.send_delay
    for name, found in rows.items():
        values = (
            [None] * 5 if found is None else [found.mean_ms, found.p50_ms, found.p90_ms, found.p99_ms, found.max_ms]
        )
        table.add_row(name, *map(_ms, values))
    return table


def _comparison(runs: "Sequence[Run]") -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("load")
    columns = ["ok", "failed", "out tok/s", "TTFT p50", "p99", "TPOT p50", "p99", "norm. p50"]
    if has_goodput := any(run.summary.goodput_per_s is not None for run in runs):
        columns.append("good/s")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        summary = run.summary
        cells = [
            f"{summary.num_ok:,}",
            f"{summary.num_failed:,}",
            f"{summary.output_tokens_per_s:,.1f}",
            *_p50_p99(summary.ttft),
            *_p50_p99(summary.tpot),
            _p50_p99(summary.normalised)[0],
        ]
        if has_goodput:
            cells.append("–" if summary.goodput_per_s is None else f"{summary.goodput_per_s:,.2f}")
        table.add_row(str(run.level), *cells)
    return table


def _p50_p99(found: "Distribution | None") -> tuple[str, str]:
    return ("–", "–") if found is None else (_ms(found.p50_ms), _ms(found.p99_ms))


def _ms(value: float | None) -> str:
    """Return at least four digits, or two decimals."""
    return "–" if value is None else f"{value:,.1f}" if value >= 100 else f"{value:.2f}"
