"""The systems that are compared, each set up as it serves best, and how each is given its work.

All get the same requests with the same number in flight. orca and vLLM are servers and are asked over HTTP by the same
client; OpenVINO GenAI, which has no server, runs in process (`openvino_driver`), which spares it all cost of one.
"""

from __future__ import annotations

import asyncio
import ctypes.util
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bench.comparison.server import Server, free_port
from bench.load.client import open_client
from bench.load.records import Outcome, RequestRecord
from bench.load.request_options import RequestOptions
from bench.load.runner import run_load
from shared.errors import OrcaError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.comparison.environments import Environment
    from bench.load.traces import TraceRequest

__all__ = [
    "Measurement",
    "OpenAiServer",
    "OpenVino",
    "System",
    "Workload",
    "check_whole",
    "clean_environment",
    "openvino",
    "orca",
    "record_of",
    "vllm",
]

KV_GIB = 2
"""Memory for K/V of each peer: more than twice of what 64 requests of the longest kind take."""

_START_S = 300.0
_RUN_S = 900.0
_DRIVER = Path(__file__).with_name("openvino_driver.py")


@dataclass(frozen=True, slots=True)
class Workload:
    """One run's requests."""

    warmup: Sequence[TraceRequest]
    """Sent first and not counted."""
    trace: Sequence[TraceRequest]
    in_flight: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """What came of one run's trace."""

    records: Sequence[RequestRecord]
    client_cpu_s: float | None
    """CPU time of the client meanwhile; None where there is none."""


class System(Protocol):
    """One way to serve the model."""

    name: str
    product: str
    """Systems of the same product are settings of it: the best of them counts."""
    versions: Mapping[str, str]
    settings: Mapping[str, Any]

    async def measure(self, workload: Workload) -> Measurement:
        """Run it alone on the machine and return what came of the trace. Raises ``OrcaError`` where it cannot."""
        ...

    async def close(self) -> None:
        """Leave nothing running."""
        ...


@dataclass(slots=True)
class OpenAiServer:
    """A server of OpenAI's API: started for each run, or once and frozen between its runs."""

    name: str
    product: str
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    server: Server
    is_kept: bool
    """It takes so long to start that it is frozen between runs instead of stopped."""
    model: str = field(default="", init=False)

    async def measure(self, workload: Workload) -> Measurement:
        """Start or thaw it, warm it up, and measure."""
        if self.server.is_started:
            self.server.thaw()
        else:
            self.model = (await self.server.start(_START_S)).name
        async with open_client(self.server.endpoint, RequestOptions(self.model)) as client:
            for trace in (workload.warmup, workload.trace):
                began_s = time.process_time()
                records = await run_load(client, trace, max_concurrency=workload.in_flight, timeout_s=_RUN_S)
                client_cpu_s = time.process_time() - began_s
                check_whole(self.name, records)
        if self.is_kept:
            self.server.freeze()
        else:
            await self.server.stop()
        return Measurement(records, client_cpu_s)

    async def close(self) -> None:
        """Stop the server."""
        await self.server.stop()


@dataclass(slots=True)
class OpenVino:
    """OpenVINO GenAI's continuous batching in process, started for each run."""

    name: str
    product: str
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    python: Path
    gguf: Path
    process: asyncio.subprocess.Process | None = field(default=None, init=False)

    async def measure(self, workload: Workload) -> Measurement:
        """Run the driver to its end."""
        job = {
            "model": str(self.gguf),
            **self.settings,
            "in_flight": workload.in_flight,
            "warmup": [(request.prompt, request.max_tokens) for request in workload.warmup],
            "trace": [(request.prompt, request.max_tokens) for request in workload.trace],
        }
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(
            str(self.python), str(_DRIVER), stdin=pipe, stdout=pipe, stderr=pipe, env=clean_environment()
        )
        try:
            async with asyncio.timeout(_RUN_S):
                out, errors = await self.process.communicate(json.dumps(job).encode())
        except TimeoutError:
            raise UnavailableError(f"{self.name} was not done in {_RUN_S:g} s") from None
        if self.process.returncode:
            raise UnavailableError(f"{self.name} failed: {errors.decode(errors='replace').strip()[-800:]}")
        records = [record_of(json.loads(line), workload.trace) for line in out.splitlines()]
        check_whole(self.name, records)
        return Measurement(records, None)

    async def close(self) -> None:
        """Kill the driver where it was left running."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


def orca(commit: str, logs: Path) -> System:
    """``orca up`` with the settings that it has by itself."""
    port = free_port()
    ports = ["--http-port", str(port), "--grpc-port", "0"]
    command = [sys.executable, "-m", "services.cli", "up", *ports]
    # The modules are found from any folder, installed or not.
    environment = clean_environment() | {"PYTHONPATH": str(Path(__file__).parents[2])}
    server = Server(command, port, environment, logs / "orca.log")
    return OpenAiServer("orca", "orca", {"orca": commit}, {"options": "defaults"}, server, is_kept=False)


def vllm(environment: Environment, model: Path, logs: Path, *, cores: Sequence[int]) -> System:
    """The server of vLLM in bfloat16 without its prefix cache, computing on ``cores``; none: as it binds itself.

    By itself it leaves one core to everything but the model.
    """
    name = f"vLLM, {len(cores)} compute cores" if cores else "vLLM, default binding"
    port = free_port()
    arguments = ["--dtype", "bfloat16", "--no-enable-prefix-caching", "--max-model-len", "2048"]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "LD_PRELOAD": ":".join(_preloaded(environment)),
        **({"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))} if cores else {}),
    }
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    where = ["--served-model-name", "peer", "--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    command = [str(environment.root / "bin" / "vllm"), "serve", str(model), *where, *arguments]
    log = logs / f"vllm-{len(cores) or 'default'}.log"
    server = Server(command, port, clean_environment() | variables | quiet, log)
    preloaded = [Path(library).name for library in _preloaded(environment)]
    settings = {"arguments": arguments, "variables": variables | {"LD_PRELOAD": preloaded}}
    return OpenAiServer(name, "vLLM", environment.versions, settings, server, is_kept=True)


def openvino(environment: Environment, gguf: Path, *, is_tuned: bool) -> System:
    """OpenVINO GenAI on the GGUF file as it is; ``is_tuned``: with what measured best where its own defaults do not.

    That is any prompt whole in one iteration, and K/V in bfloat16 instead of 8 bits.
    """
    settings: dict[str, Any] = {"kv_gib": KV_GIB, "max_batch_tokens": 0, "properties": {}}
    if is_tuned:
        settings |= {"max_batch_tokens": 512, "properties": {"KV_CACHE_PRECISION": "bf16"}}
    name = "OpenVINO, tuned" if is_tuned else "OpenVINO, defaults"
    return OpenVino(name, "OpenVINO", environment.versions, settings, environment.python, gguf)


def _preloaded(environment: Environment) -> list[str]:
    """Return what vLLM's documentation wants in LD_PRELOAD: Intel's OpenMP, and tcmalloc where the system has it."""
    allocator = ctypes.util.find_library("tcmalloc_minimal")
    return [str(environment.root / "lib" / "libiomp5.so"), *([allocator] if allocator else [])]


def clean_environment() -> dict[str, str]:
    """Return ours without what would change a system's defaults."""
    ours = ("ORCA_", "VLLM_", "OMP_", "PYTHONPATH", "LD_PRELOAD")
    return {name: value for name, value in os.environ.items() if name == "ORCA_HOME" or not name.startswith(ours)}


def record_of(line: list[Any], trace: Sequence[TraceRequest]) -> RequestRecord:
    """Make a record of what the driver printed of a request."""
    index, sent_ns, event_times_ns, num_output_tokens = line
    request = trace[index]
    return RequestRecord(
        index=index,
        outcome=Outcome.OK,
        started_ns=sent_ns,
        sent_ns=sent_ns,
        ended_ns=event_times_ns[-1] if event_times_ns else sent_ns,
        event_times_ns=tuple(event_times_ns),
        num_prompt_tokens=len(request.prompt),
        num_output_tokens=num_output_tokens,
        max_tokens=request.max_tokens,
    )


def check_whole(name: str, records: Sequence[RequestRecord]) -> None:
    """Raise where a system did not do all of its work: its numbers would say nothing."""
    for record in records:
        if record.outcome is not Outcome.OK:
            raise OrcaError(f"{name}: request {record.index} failed: {record.error}")
        if record.num_output_tokens != record.max_tokens:
            got, wanted = record.num_output_tokens, record.max_tokens
            raise OrcaError(f"{name}: request {record.index} has {got} output tokens of {wanted}")
