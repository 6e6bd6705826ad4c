"""What this machine is, as far as it decides how fast a model runs on it; and which version runs."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["Machine", "commit"]

_DECISIVE_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine."""

    cpu_vendor: str
    cpu_model: str
    instruction_set: tuple[str, ...]
    """Those extensions of it that matrix products use."""
    num_cores: int
    """That this process may use."""
    memory_gib: int

    @classmethod
    def this(cls) -> Self:
        """Look at the machine that this runs on."""
        cpu = _first_cpu(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        flags = cpu.get("flags", "").split()
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(
            cpu_vendor=cpu.get("vendor_id", ""),
            cpu_model=_model_name(cpu),
            instruction_set=tuple(flag for flag in _DECISIVE_FLAGS if flag in flags) or (platform.machine(),),
            num_cores=len(os.sched_getaffinity(0)),
            memory_gib=round(memory_bytes / 2**30),
        )

    @property
    def is_zen_with_avx512(self) -> bool:
        """Whether vLLM has a plugin of its own for it."""
        return self.cpu_vendor == "AuthenticAMD" and "avx512f" in self.instruction_set


def commit() -> str:
    """Return the version of this checkout, as git describes it; what is not committed makes it "dirty"."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    told = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return told.stdout.strip() or "unknown"


def _first_cpu(cpuinfo: str) -> dict[str, str]:
    """Return the fields of the first processor that Linux lists."""
    first = cpuinfo.strip().partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _model_name(cpu: dict[str, str]) -> str:
    """Return the name with family and model: the name alone says little on a virtual machine."""
    name = cpu.get("model name", platform.processor() or platform.machine())
    family, model = cpu.get("cpu family"), cpu.get("model")
    return f"{name} (family {family}, model {model})" if family and model else name
