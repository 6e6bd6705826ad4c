"""A benchmark as a picture: distributions of latencies, and what throughput they come at.

The only module that sees matplotlib, which is an extra. It draws on no screen.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from bench.load.records import Outcome
from shared.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from bench.load.benchmark import Benchmark, Run

__all__ = ["check_can_plot", "plot"]

_SIZE_INCHES = (11.0, 7.5)
_DPI = 120
_WIDE = 10
"""Latencies that differ by more have a logarithmic axis."""
_NUM_BINS = 60


def check_can_plot() -> None:
    """Raise ``ConfigError`` where matplotlib is missing."""
    try:
        import matplotlib as mpl  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise ConfigError("a report as PNG needs matplotlib: pip install matplotlib") from error


def plot(benchmark: Benchmark, path: Path, *, label: str = "") -> None:
    """Write a PNG. Raises ``ConfigError`` where matplotlib is missing, ``OSError`` where it cannot be written."""
    check_can_plot()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    ttft, itl, normalised, throughput = figure.subplots(2, 2).flat
    config = benchmark.config
    title = f"{config.options.model} at {config.endpoint.url}, trace {config.trace.name.value}"
    figure.suptitle(f"{label}: {title}" if label else title, parse_math=False)
    runs = [run for run in benchmark.runs if run.summary.num_ok]
    _cumulative(ttft, "time to first token, ms", runs, [_ttft(run) for run in runs])
    _cumulative(itl, "inter-token latency, ms", runs, [_itl(run) for run in runs])
    _cumulative(normalised, "normalised latency, ms per output token", runs, [_normalised(run) for run in runs])
    if len(runs) == 1:
        _over_time(throughput, runs[0])
    else:
        _trade_off(throughput, runs)
    with path.open("wb") as file:
        figure.savefig(file, format="png", dpi=_DPI)


def _ttft(run: Run) -> list[float]:
    return [record.ttft_ms for record in run.records if record.outcome is Outcome.OK]


def _itl(run: Run) -> list[float]:
    ok = (record for record in run.records if record.outcome is Outcome.OK)
    return [(after - before) / 1e6 for record in ok for before, after in pairwise(record.event_times_ns)]


def _normalised(run: Run) -> list[float]:
    return [record.normalised_ms for record in run.records if record.outcome is Outcome.OK]


def _cumulative(axes: Axes, name: str, runs: Sequence[Run], values_ms: Sequence[Sequence[float]]) -> None:
    """Draw which part of the values is at most so much, a line for each run."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for run, values in zip(runs, values_ms, strict=True):
        if values:
            axes.step(np.sort(values), np.arange(1, len(values) + 1) / len(values), where="post", label=str(run.level))
    axes.set_xlabel(name)
    axes.set_ylabel("part of all")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    positive = [value for values in values_ms for value in values if value > 0]
    if positive and max(positive) > _WIDE * min(positive):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    if axes.lines:
        axes.legend()


def _over_time(axes: Axes, run: Run) -> None:
    """Draw how many events with output came when."""
    begin_ns = min(record.started_ns for record in run.records)
    times_s = [(time_ns - begin_ns) / 1e9 for record in run.records for time_ns in record.event_times_ns]
    counts, edges = np.histogram(times_s, bins=_NUM_BINS, range=(0, max(run.summary.duration_s, 1e-9)))
    axes.stairs(counts / np.diff(edges), edges)
    axes.set_xlabel("time, s")
    axes.set_ylabel("events with output per second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _trade_off(axes: Axes, runs: Sequence[Run]) -> None:
    """Draw latency over throughput, a point for each run, as ORCA's figure 10 does."""
    points = [
        (run.summary.output_tokens_per_s, run.summary.normalised.p50_ms, str(run.level))
        for run in runs
        if run.summary.normalised is not None
    ]
    axes.plot([x for x, _, _ in points], [y for _, y, _ in points], marker="o")
    for x, y, level in points:
        axes.annotate(level, (x, y), textcoords="offset points", xytext=(5, 5))
    axes.set_xlabel("output tokens per second")
    axes.set_ylabel("median normalised latency, ms")
    axes.set_xlim(0, 1.25 * max((x for x, _, _ in points), default=1.0))  # room for the last name
    axes.set_ylim(0, 1.15 * max((y for _, y, _ in points), default=1.0))
    axes.grid(alpha=0.3)
