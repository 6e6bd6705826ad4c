"""Where the microseconds of one iteration go: ``python -m bench.profile_iteration``.

At each number of requests in flight a default mesh decodes (`bench.profile_mesh`), and the parts of the same iteration
are measured by themselves (`bench.profile_parts`) beside what the machine can do at best (`bench.roofline`). What the
parts do not explain of the mesh's iteration is shown as such. Prints one JSON line; ``--write`` puts it into
bench/results, with machine and commit, and its tables into docs/performance.md. Takes about two minutes on a quiet
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench.comparison.machine import Machine, commit
from bench.profile_mesh import MAX_ITERATIONS, PROMPT_TOKENS, LiveProfile, profile_mesh
from bench.profile_parts import ModelParts, ModelProfiler, python_parts
from bench.roofline import Roofline, measure_roofline
from services.mesh.options import MeshOptions
from shared.config import DEFAULT_MODEL, EngineConfig, SchedulingConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Profile", "parse", "replace_tables", "tables"]

_RESULTS = Path(__file__).parent / "results" / "profile_iteration.jsonl"
_DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"
_BEGIN, _END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"


@dataclass(frozen=True, slots=True)
class Profile:
    """All that is measured for one number of requests."""

    live: LiveProfile
    parts: ModelParts
    python: dict[str, float]


def profile(num_requests: int, num_iterations: int, model: ModelProfiler, threads: int) -> Profile:
    """Measure with ``num_requests`` in flight, all of them in one iteration."""
    default = SchedulingConfig()
    scheduling = replace(default, max_batch_size=max(default.max_batch_size, num_requests))
    options = MeshOptions(engine=EngineConfig(model=DEFAULT_MODEL, scheduling=scheduling), num_threads=threads)
    live = asyncio.run(profile_mesh(num_requests, num_iterations, options))
    context = PROMPT_TOKENS + num_iterations // 2
    parts = model.profile(live.batch_size, context, threads, max(8, num_iterations // 4))
    return Profile(live, parts, python_parts(live.batch_size, PROMPT_TOKENS, 300))


def tables(profiles: Sequence[Profile], roofline: Roofline) -> str:
    """Return the tables of the document, as Markdown."""
    reads = ", ".join(
        f"{read / 1e9:.0f} GB/s and {rate / 1e9:.0f} G multiply-adds/s with {threads} thread{'s' * (threads > 1)}"
        for threads, read, rate in zip(roofline.threads, roofline.read_bytes_s, roofline.multiplies_s, strict=True)
    )
    header = ["", *(f"{one.live.num_requests} in flight" for one in profiles)]
    sections = [
        f"The machine at its best: {reads}.\n",
        _table(header, _wall_rows(profiles, roofline)),
        "CPU time of all threads, µs an iteration:\n",
        _table(header, _cpu_rows(profiles)),
        "Python's functions with warm caches, µs an iteration:\n",
        _table(header, _python_rows(profiles)),
    ]
    return "\n".join(sections)


_WALL_ROWS = (
    "matrix products",
    "attention",
    "other operations",
    "output head, sampling",
    "not explained: in a mesh, caches and cores are shared",
    "between two iterations",
    "**one iteration**",
    "token to token at the client",
    "output tokens/s",
    "control plane ahead by",
)


def _wall_rows(profiles: Sequence[Profile], roofline: Roofline) -> list[list[str]]:
    roof = roofline.at_best_us

    def part(us: float, best_us: float) -> str:
        return f"{us:,.0f} ({best_us:,.0f})"

    columns = [
        [
            part(p.products_us, roof(p.threads, num_bytes=p.products_bytes, multiplies=p.products_multiplies)),
            part(p.attention_us, roof(p.threads, num_bytes=p.attention_bytes)),
            f"{p.other_us:,.0f}",
            part(p.head_us, roof(p.threads, num_bytes=p.head_bytes, multiplies=p.head_multiplies)),
            f"{live.compute_us - p.whole_us:,.0f}",
            f"{live.gap_us:,.0f}",
            f"**{live.iteration_us:,.0f}**",
            f"{live.token_interval_us:,.0f}",
            f"{1e6 * live.batch_size / live.iteration_us:,.0f}",
            f"{live.ahead_us:,.0f}",
        ]
        for live, p in ((one.live, one.parts) for one in profiles)
    ]
    return [[name, *values] for name, *values in zip(_WALL_ROWS, *columns, strict=True)]


def _cpu_rows(profiles: Sequence[Profile]) -> list[list[str]]:
    roles = list(dict.fromkeys(role for one in profiles for role in sorted(one.live.cpu_us)))
    rows = [[role, *(f"{one.live.cpu_us.get(role, 0.0):,.0f}" for one in profiles)] for role in roles]
    rows = [row for row in rows if set(row[1:]) != {"0"}]
    idle = (one.live.num_cpus * one.live.wall_us - sum(one.live.cpu_us.values()) for one in profiles)
    waits = (one.live.cpu_wait_us.get("worker: compute", 0.0) for one in profiles)
    return [
        *rows,
        ["idle, or other programs", *(f"{us:,.0f}" for us in idle)],
        ["compute threads ready, without a core", *(f"{us:,.0f}" for us in waits)],
    ]


def _python_rows(profiles: Sequence[Profile]) -> list[list[str]]:
    return [[name, *(f"{one.python[name]:,.0f}" for one in profiles)] for name in profiles[0].python]


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def replace_tables(document: str, text: str) -> str:
    """Return the document with other tables between its two marks. Raises ``ValueError`` where it has none."""
    before, begin, rest = document.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"has no lines {_BEGIN.strip()} and {_END.strip()}")
    return before + begin + text + end + after


def _write(line: str, text: str) -> None:
    _RESULTS.write_text(line + "\n", encoding="utf-8")
    _DOCUMENT.write_text(replace_tables(_DOCUMENT.read_text(encoding="utf-8"), text), encoding="utf-8")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; all that is wrong with them is told before anything is measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.profile_iteration", description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64], help="in flight")
    parser.add_argument("--iterations", type=int, default=100, help=f"in each window, 2 to {MAX_ITERATIONS}")
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        help="that may compute, one number for each of --requests (default: the CPUs); few tokens take fewer",
    )
    parser.add_argument("--write", action="store_true", help="keep the results, and bring the document up to date")
    parsed = parser.parse_args(arguments)
    parsed.threads = parsed.threads or [len(os.sched_getaffinity(0))] * len(parsed.requests)
    if len(parsed.threads) != len(parsed.requests):
        parser.error("--threads has as many numbers as --requests")
    if min(*parsed.requests, *parsed.threads) < 1:
        parser.error("requests in flight and threads are at least 1")
    if not 2 <= parsed.iterations <= MAX_ITERATIONS:
        parser.error(f"--iterations is 2 to {MAX_ITERATIONS}")
    if parsed.write:
        try:
            replace_tables(_DOCUMENT.read_text(encoding="utf-8"), "")
        except (OSError, ValueError) as error:
            parser.error(f"--write: {_DOCUMENT}: {error}")
    return parsed


def main() -> None:
    arguments = parse()
    version = commit()  # of what is measured: --write changes files of the checkout
    model = ModelProfiler(DEFAULT_MODEL)
    profiles = [
        profile(num_requests, arguments.iterations, model, threads)
        for num_requests, threads in zip(arguments.requests, arguments.threads, strict=True)
    ]
    chosen = {one.parts.threads for one in profiles}
    roofline = measure_roofline(tuple(sorted({1, len(os.sched_getaffinity(0))} | chosen)))
    measured = {
        "measurement": "profile_iteration",
        "commit": version,
        "machine": asdict(Machine.this()),
        "roofline": asdict(roofline),
        "profiles": [asdict(one) for one in profiles],
    }
    line = json.dumps(measured)
    print(line, flush=True)
    if arguments.write:
        _write(line, tables(profiles, roofline))


if __name__ == "__main__":
    main()
