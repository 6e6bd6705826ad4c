from __future__ import annotations

import struct
import sys
from typing import TYPE_CHECKING

import pytest

from bench.load.benchmark import Benchmark, BenchmarkConfig, LoadLevel, Run
from bench.load.endpoint import Endpoint
from bench.load.metrics import summarize
from bench.load.plot import check_can_plot, plot
from bench.load.records import Outcome, RequestRecord
from bench.load.request_options import RequestOptions
from bench.load.traces import TraceConfig, TraceName
from shared.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def benchmark(num_runs: int, outcome: Outcome = Outcome.OK) -> Benchmark:
    times_ns = tuple(range(10_000_000, 60_000_000, 10_000_000))
    records = [
        RequestRecord(index, outcome, index * 10**9, index * 10**9, index * 10**9 + times_ns[-1], times_ns, 9, 5, 5)
        for index in range(3)
    ]
    levels = [LoadLevel(float(rate)) for rate in range(1, num_runs + 1)]
    config = BenchmarkConfig(
        Endpoint.parse("http://127.0.0.1:8000"),
        RequestOptions("a $model$ with_math^in its name"),
        TraceConfig.of(TraceName.FIXED, num_requests=3),
        300,
        levels,
    )
    return Benchmark(config, [Run(level, 0, summarize(records), records, 0.1, was_stopped=False) for level in levels])


@pytest.mark.parametrize(
    "measured",
    [benchmark(1), benchmark(3), benchmark(0), benchmark(2, Outcome.FAILED)],
    ids=["one run", "three runs", "none", "failures alone"],
)
def test_a_picture_is_drawn(measured: Benchmark, tmp_path: Path) -> None:
    path = tmp_path / "report.png"
    plot(measured, path, label="before")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (1320, 900)


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        check_can_plot()
    with pytest.raises(ConfigError, match="needs matplotlib"):
        plot(benchmark(1), tmp_path / "report.png")
    assert list(tmp_path.iterdir()) == []
