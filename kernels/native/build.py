"""From C++ sources to a shared library for this processor: compiled once, kept in the user's cache.

The name of the library in the cache has everything in it that it depends on: sources, flags, compiler. Plain C
functions and no header of torch's: that takes seconds, not a minute, and does not depend on torch's version. Files are
compiled side by side, one on each CPU.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

__all__ = ["BuildError", "InstructionSet", "build", "cpu_flags", "instruction_sets"]

_SOURCES = Path(__file__).parent / "src"
_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fPIC", "-fno-math-errno", "-Wno-maybe-uninitialized")
_TIMEOUT_S = 300


class BuildError(Exception):
    """There is no library, and why."""


class InstructionSet(NamedTuple):
    """What the processor can do, and how the compiler is told."""

    name: str
    flags: tuple[str, ...]


def instruction_sets(cpu_flags: frozenset[str]) -> list[InstructionSet]:
    """Return what can be used, the best first, by the flags that Linux names in /proc/cpuinfo."""
    sets = [InstructionSet("plain", ())]
    if {"avx2", "fma", "f16c"} <= cpu_flags:
        sets.append(InstructionSet("avx2", ("-march=x86-64-v3",)))
        if "avx_vnni" in cpu_flags:
            sets.append(InstructionSet("avx2-vnni", ("-march=x86-64-v3", "-mavxvnni")))
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"} <= cpu_flags:
        name, flags = "avx512", ("-march=x86-64-v4", "-mavx512vnni")
        sets.append(InstructionSet(name, flags))
        for suffix, needed, more in (
            ("-bf16", {"avx512_bf16"}, ("-mavx512bf16",)),
            ("-amx", {"amx_tile", "amx_int8"}, ("-mamx-tile", "-mamx-int8")),
        ):
            if needed <= cpu_flags:
                name, flags = name + suffix, (*flags, *more)
                sets.append(InstructionSet(name, flags))
    return sets[::-1]


def cpu_flags() -> frozenset[str]:
    """Return the flags of this machine's processor; none where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def build(chosen: InstructionSet, cache: Path) -> Path:
    """Return the library, compiled now if it is not in ``cache``. Raises ``BuildError``.

    Processes that need it at the same time wait for the first of them.
    """
    compiler = _compiler()
    sources = sorted(_SOURCES.iterdir())
    key = hashlib.sha256()
    for part in (*compiler, *map(_version, compiler), *_FLAGS, *chosen.flags):
        key.update(part.encode() + b"\0")
    for source in sources:
        key.update(source.name.encode() + b"\0" + source.read_bytes())
    library = cache / f"orca-{chosen.name}-{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    failed = library.with_suffix(".failed")
    _check_not_failed(failed)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _check_not_failed(failed)  # by whom we have waited for
            if not library.exists():
                _compile(compiler, chosen, [source for source in sources if source.suffix == ".cpp"], library)
    except OSError as error:
        raise BuildError(f"{cache} cannot be written: {error.strerror}; set XDG_CACHE_HOME to where it can") from error
    return library


def _compiler() -> list[str]:
    """Return the compiler and the arguments that it is always given."""
    chosen = os.environ.get("CXX", "")
    try:
        compiler = shlex.split(chosen)
    except ValueError as error:
        raise BuildError(f"CXX={chosen} cannot be read: {error}") from error
    found = compiler or [path for path in map(shutil.which, ("g++", "clang++")) if path][:1]
    if not found:
        raise BuildError("there is no C++ compiler; install g++")
    return found


def _check_not_failed(failed: Path) -> None:
    if failed.exists():
        raise BuildError(f"{failed.read_text(encoding='utf-8')} (found before; to try again, delete {failed})")


def _version(program: str) -> str:
    """What changes when the compiler does."""
    try:
        found = Path(shutil.which(program) or program).resolve().stat()
    except OSError:
        return ""
    return f"{found.st_size} {found.st_mtime_ns}"


def _compile(compiler: list[str], chosen: InstructionSet, sources: list[Path], library: Path) -> None:
    command = [*compiler, *_FLAGS, *chosen.flags]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        output, objects = Path(folder) / library.name, [f"{folder}/{source.stem}.o" for source in sources]
        compilations = [[*command, "-c", str(source), "-o", to] for source, to in zip(sources, objects, strict=True)]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(_run, compilations))
        _run([*command, "-shared", *objects, "-o", str(output)])
        _check(output, library.with_suffix(".failed"))
        with output.open("rb") as written:
            os.fsync(written.fileno())
        output.replace(library)  # in one piece: who loads it finds all of it or nothing


def _run(command: list[str]) -> None:
    """Run a compiler. Raises ``BuildError`` with the first error that it tells."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise BuildError(f"{command[0]} failed: {first}")


def _check(library: Path, failed: Path) -> None:
    """Have the library try itself in a process of its own, which an instruction that is not there would end.

    That it fails is written to ``failed``; that it could not be tried may be different the next time.
    """
    script = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).orca_check())"
    command = [sys.executable, "-c", script, str(library)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the compiled kernels cannot be tried: {error}") from error
    if done.returncode:
        reason = f"the compiled kernels failed their check: exit code {done.returncode}"
        failed.write_text(reason, encoding="utf-8")
        raise BuildError(reason)
