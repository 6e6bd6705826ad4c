"""Who may import whom, read from the syntax tree of every module; imports inside functions count like any other.

Each rule is tried on a bad sample first, so that a rule which has gone blind fails, too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
OURS = ("shared", "services", "kernels")
TREES = (*OURS, "tests", "bench")

SERVICES = {"gateway", "scheduler", "worker"}
"""cli and mesh are not among them: they start the services, and may see them all."""

SEES_PB = {
    # Servicers and typed clients; ``shared/codec`` as a whole comes on top.
    "bench/gateway_cost.py",
    "bench/profile_parts.py",
    "shared/client.py",
    "shared/worker_client.py",
    "services/gateway/app.py",
    "services/gateway/scheduler_client.py",
    "services/gateway/servicer.py",
    "services/scheduler/app.py",
    "services/scheduler/epoch.py",
    "services/scheduler/registry.py",
    "services/scheduler/servicer.py",
    "services/worker/app.py",
    "services/worker/forwarding.py",
    "services/worker/registration.py",
    "services/worker/servicer.py",
}

SLEEPS = {
    # Waits for the server of another project, which tells nobody that it is ready.
    "bench/comparison/server.py",
    # Offers load at a rate.
    "bench/gateway_cost.py",
    # Back-off before a reconnect, with jitter.
    "services/gateway/scheduler_client.py",
    "services/scheduler/keeper.py",
    "services/worker/registration.py",
    "services/cli/top.py",
    # Asks for a sign of life now and then.
    "services/scheduler/heartbeat.py",
    # Looks after a limit whether there has been progress.
    "services/scheduler/loop.py",
    # Looks at its file now and then.
    "services/gateway/api_keys.py",
}

IMPURE = {"asyncio", "grpc", "logging", "os", "random", "socket", "structlog", "threading", "time", "torch"}
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}


@dataclass(frozen=True, slots=True)
class Use:
    """One thing that a module uses: an imported name, or a call."""

    path: str
    """Of the module, from the root of the project."""
    name: str
    """Dotted name: of an import the module and what is taken from it, of a call the function as it is written."""
    is_call: bool
    line: int

    def is_of(self, *packages: str) -> bool:
        """Whether it imports one of ``packages`` or something inside."""
        return not self.is_call and any(
            self.name == package or self.name.startswith(f"{package}.") for package in packages
        )

    def lies_in(self, *folders: str) -> bool:
        """Whether the module is in one of ``folders``."""
        return self.path.startswith(tuple(f"{folder}/" for folder in folders))


def uses(path: str, source: str) -> Iterator[Use]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Use(path, alias.name, is_call=False, line=node.lineno)
        elif isinstance(node, ast.ImportFrom):
            package = path.removesuffix(".py").split("/")[: -node.level] if node.level else []
            module = ".".join([*package, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                yield Use(path, f"{module}.{alias.name}", is_call=False, line=node.lineno)
        elif isinstance(node, ast.Call):
            yield Use(path, ast.unparse(node.func), is_call=True, line=node.lineno)


def leaf(use: Use) -> str:
    return use.name.rpartition(".")[2]


def shared_and_kernels_stand_alone(use: Use) -> bool:
    home = use.path.partition("/")[0]
    return home in {"shared", "kernels"} and use.is_of(*(package for package in (*TREES,) if package != home))


def no_service_imports_another(use: Use) -> bool:
    parts = use.path.split("/")
    if parts[0] != "services" or parts[1] not in SERVICES or not use.is_of("services"):
        return False
    if parts[2:] == ["__main__.py"]:
        # ``python -m services.gateway`` is ``orca gateway``.
        return not use.is_of("services.cli.main")
    return not use.is_of(f"services.{parts[1]}")


def only_edges_see_protobuf(use: Use) -> bool:
    return use.is_of("shared.pb") and not use.lies_in("shared/codec", "shared/pb", "tests") and use.path not in SEES_PB


def torch_stays_with_the_workers(use: Use) -> bool:
    return use.is_of("torch", "triton") and not use.lies_in("services/worker", "kernels", "tests", "bench")


def the_scheduler_core_is_pure(use: Use) -> bool:
    return use.lies_in("services/scheduler/core") and use.is_of(*IMPURE)


def opentelemetry_is_an_extra(use: Use) -> bool:
    return use.is_of("opentelemetry") and use.path != "shared/otlp.py" and not use.lies_in("tests")


def nobody_sleeps(use: Use) -> bool:
    return use.is_call and leaf(use) == "sleep" and use.path not in SLEEPS


def nobody_forks(use: Use) -> bool:
    # gRPC's threads do not survive a fork; programs are started instead (subprocess, asyncio).
    return use.lies_in(*OURS) and (use.is_of("multiprocessing") or use.name in {"os.fork", "os.forkpty"})


def nobody_pickles(use: Use) -> bool:
    if use.is_call:
        return use.name in {"torch.load", "torch.save"} or leaf(use) in OBJECT_COLLECTIVES
    return use.is_of(*PICKLES)


def nothing_of_ours_imports_tests(use: Use) -> bool:
    return (use.lies_in(*OURS) or use.lies_in("bench")) and use.is_of("tests")


def only_the_command_line_puts_load_on_servers(use: Use) -> bool:
    may = use.lies_in("services/cli") and use.is_of("bench.load")
    return use.lies_in(*OURS) and use.is_of("bench") and not may


def the_load_client_stands_on_shared_alone(use: Use) -> bool:
    if not use.lies_in("bench/load"):
        return False
    return use.is_of("services", "kernels", "torch") or (use.is_of("bench") and not use.is_of("bench.load"))


def matplotlib_is_an_extra(use: Use) -> bool:
    return use.is_of("matplotlib") and use.path != "bench/load/plot.py" and not use.lies_in("tests")


RULES_WITH_BAD_SAMPLES: list[tuple[Callable[[Use], bool], str, str]] = [
    (shared_and_kernels_stand_alone, "shared/model/x.py", "from services.worker import app"),
    (shared_and_kernels_stand_alone, "shared/x.py", "import kernels"),
    (shared_and_kernels_stand_alone, "kernels/x.py", "def f():\n    from shared import errors"),
    (no_service_imports_another, "services/gateway/x.py", "import services.scheduler.app"),
    (no_service_imports_another, "services/gateway/text/x.py", "from ...scheduler import app"),
    (no_service_imports_another, "services/worker/x.py", "from services import cli"),
    (no_service_imports_another, "services/worker/__main__.py", "from services.gateway.app import run_gateway"),
    (only_edges_see_protobuf, "services/scheduler/loop.py", "from shared.pb import common_pb2"),
    (only_edges_see_protobuf, "shared/messages.py", "from shared import pb"),
    (torch_stays_with_the_workers, "shared/model/x.py", "if True:\n    import torch.nn.functional as F"),
    (torch_stays_with_the_workers, "services/cli/x.py", "from torch import Tensor"),
    (the_scheduler_core_is_pure, "services/scheduler/core/core.py", "import time"),
    (the_scheduler_core_is_pure, "services/scheduler/core/x.py", "from asyncio import Queue"),
    (opentelemetry_is_an_extra, "services/gateway/x.py", "from opentelemetry import trace"),
    (nobody_sleeps, "services/worker/x.py", "import asyncio\nasync def f():\n    await asyncio.sleep(1)"),
    (nobody_sleeps, "tests/unit/x.py", "from time import sleep\nsleep(1)"),
    (nobody_forks, "services/worker/x.py", "import os\ndef f():\n    os.fork()"),
    (nobody_forks, "shared/x.py", "from multiprocessing import get_context"),
    (nobody_pickles, "shared/x.py", "import pickle"),
    (nobody_pickles, "services/worker/model/x.py", "import torch\ntorch.load('weights.bin')"),
    (nobody_pickles, "services/worker/x.py", "import torch.distributed as dist\ndist.broadcast_object_list([1])"),
    (nothing_of_ours_imports_tests, "services/worker/x.py", "from tests.fakes import scripted_workers"),
    (nothing_of_ours_imports_tests, "bench/load/x.py", "import tests.factories"),
    (only_the_command_line_puts_load_on_servers, "services/gateway/x.py", "from bench.load.runner import run_load"),
    (only_the_command_line_puts_load_on_servers, "services/cli/x.py", "from bench import gateway_cost"),
    (the_load_client_stands_on_shared_alone, "bench/load/x.py", "from services.mesh import LocalMesh"),
    (the_load_client_stands_on_shared_alone, "bench/load/x.py", "from bench.perplexity import main"),
    (matplotlib_is_an_extra, "bench/load/report.py", "from matplotlib.figure import Figure"),
]
RULES = list(dict.fromkeys(rule for rule, _, _ in RULES_WITH_BAD_SAMPLES))


@pytest.fixture(scope="module")
def all_uses() -> list[Use]:
    found = []
    for tree in TREES:
        for file in sorted((ROOT / tree).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            if not path.startswith("shared/pb/"):
                found += list(uses(path, file.read_text(encoding="utf-8")))
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Callable[[Use], bool], all_uses: list[Use]) -> None:
    broken = [f"{use.path}:{use.line}: {use.name}" for use in all_uses if rule(use)]
    assert not broken, "\n".join([f"{rule.__name__.replace('_', ' ')}, but:", *broken])


@pytest.mark.parametrize(("rule", "path", "source"), RULES_WITH_BAD_SAMPLES)
def test_rule_sees_a_bad_sample(rule: Callable[[Use], bool], path: str, source: str) -> None:
    assert any(rule(use) for use in uses(path, source))


@pytest.mark.parametrize("listed", [SEES_PB, SLEEPS], ids=["protobuf", "sleeps"])
def test_exceptions_exist_and_are_needed(listed: set[str], all_uses: list[Use]) -> None:
    needed = {use.path for use in all_uses if use.is_of("shared.pb") or (use.is_call and leaf(use) == "sleep")}
    assert listed <= needed, f"no longer needed: {sorted(listed - needed)}"


@pytest.mark.parametrize(
    "module", ["services.gateway.app", "services.scheduler.app", "services.cli.main", "services.mesh"]
)
def test_torch_is_not_even_imported_indirectly(module: str) -> None:
    script = f"import sys, {module}; print(sorted({{'torch', 'triton', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_the_command_line_starts_light() -> None:
    script = (
        "import sys, services.cli.main; "
        "print(sorted({'grpc', 'numpy', 'google.protobuf', 'tokenizers', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
