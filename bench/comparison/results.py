"""One line for each run, and what lines say side by side: medians and ratios, as a table in Markdown."""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from shared.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from bench.load.metrics import Summary

__all__ = ["RunResult", "append", "latest", "read", "table"]

OURS = "orca"
VLLM = "vLLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What one system did with one workload."""

    comparison: str
    """When the comparison began, UTC: runs are compared with those of the same one only."""
    system: str
    product: str
    repetition: int
    in_flight: int
    num_requests: int
    seed: int
    duration_s: float
    output_tokens_per_s: float
    input_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    normalised_p50_ms: float
    client_cores: float | None
    """Cores that the client took: what is left to a server is that much less; None: there is no client."""
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]

    @classmethod
    def of(cls, summary: Summary, **identity: Any) -> Self:
        """Sum up a run of which every request ended well; ``identity`` is what a summary does not know."""
        assert summary.ttft
        assert summary.tpot
        assert summary.normalised
        return cls(
            num_requests=summary.num_requests,
            duration_s=round(summary.duration_s, 2),
            output_tokens_per_s=round(summary.output_tokens_per_s, 1),
            input_tokens_per_s=round(summary.input_tokens_per_s, 1),
            ttft_p50_ms=round(summary.ttft.p50_ms, 1),
            ttft_p99_ms=round(summary.ttft.p99_ms, 1),
            tpot_p50_ms=round(summary.tpot.p50_ms, 2),
            tpot_p99_ms=round(summary.tpot.p99_ms, 2),
            normalised_p50_ms=round(summary.normalised.p50_ms, 2),
            **identity,
        )


def append(path: Path, result: RunResult) -> None:
    """Add a line to a file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(result)) + "\n")


def read(path: Path) -> list[RunResult]:
    """Read a file of results. Raises ``ConfigError`` where it is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [RunResult(**json.loads(line)) for line in lines if line]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} has no results of a comparison: {error}") from error


def latest(results: Iterable[RunResult]) -> list[RunResult]:
    """Return the runs of the last comparison among ``results``."""
    results = list(results)
    last = max((result.comparison for result in results), default="")
    return [result for result in results if result.comparison == last]


def table(results: Sequence[RunResult]) -> str:
    """Return medians over repetitions, a product's best setting at each load, and the ratios to orca."""
    peers = list(dict.fromkeys(result.product for result in results if result.product != OURS))
    systems = list(dict.fromkeys(result.system for result in results))
    levels = sorted({result.in_flight for result in results})
    lines = [_heading(results), ""]
    lines += _row(["output tokens/s", *(f"{level} in flight" for level in levels)])
    lines += _row(["---"] + ["---:"] * len(levels))
    throughput = {system: [_spread(results, system, level) for level in levels] for system in systems}
    lines += [line for system, cells in throughput.items() for line in _row([system, *cells])]
    best_peer = [_best(results, peers, level, _throughput, max) for level in levels]
    best_vllm = [_best(results, [VLLM], level, _throughput, max) for level in levels]
    ours = [_best(results, [OURS], level, _throughput, max) for level in levels]
    lines += _row(["orca / best peer", *map(_ratio, ours, best_peer)])
    lines += _row(["orca / vLLM", *map(_ratio, ours, best_vllm)])
    lines += ["", *_row(["first token p50, ms", *(f"{level} in flight" for level in levels)])]
    lines += _row(["---"] + ["---:"] * len(levels))
    for system in systems:
        cells = [_number(_median(results, system, level, lambda result: result.ttft_p50_ms)) for level in levels]
        lines += _row([system, *cells])
    firsts = [_best(results, [product], level, _ttft, min) for product in (OURS, VLLM) for level in levels]
    lines += _row(["orca / vLLM", *map(_ratio, firsts[: len(levels)], firsts[len(levels) :])])
    return "\n".join(lines)


def _throughput(result: RunResult) -> float:
    return result.output_tokens_per_s


def _ttft(result: RunResult) -> float:
    return result.ttft_p50_ms


def _heading(results: Sequence[RunResult]) -> str:
    """Say when, where, and of how many runs."""
    if not results:
        return "no runs"
    machine = results[0].machine
    repetitions = max(result.repetition for result in results)
    versions = dict(item for result in results for item in result.versions.items())
    requests = {result.in_flight: result.num_requests for result in results}
    return (
        f"{results[0].comparison}; medians (least to most) of {repetitions} alternating runs of "
        f"{'/'.join(str(requests[level]) for level in sorted(requests))} requests; "
        f"{machine['cpu_model']}, {machine['num_cores']} cores, {' '.join(machine['instruction_set'])}; "
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}"
    )


def _row(cells: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(cells)} |"]


def _values(results: Sequence[RunResult], system: str, level: int, value: Callable[[RunResult], float]) -> list[float]:
    return [value(result) for result in results if result.system == system and result.in_flight == level]


def _median(results: Sequence[RunResult], system: str, level: int, value: Callable[[RunResult], float]) -> float | None:
    values = _values(results, system, level, value)
    return statistics.median(values) if values else None


def _best(
    results: Sequence[RunResult],
    products: Sequence[str],
    level: int,
    value: Callable[[RunResult], float],
    choose: Callable[[Iterable[float]], float],
) -> float | None:
    """Return the best median among all settings of some products at one load."""
    systems = {result.system for result in results if result.product in products}
    medians = (_median(results, system, level, value) for system in systems)
    known = [median for median in medians if median is not None]
    return choose(known) if known else None


def _spread(results: Sequence[RunResult], system: str, level: int) -> str:
    values = _values(results, system, level, _throughput)
    if not values:
        return "–"
    return f"{_number(statistics.median(values))} ({_number(min(values))}–{_number(max(values))})"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _ratio(ours: float | None, theirs: float | None) -> str:
    return f"{ours / theirs:.2f}" if ours and theirs else "–"
