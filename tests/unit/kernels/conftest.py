"""The compiled kernels, for each instruction set that this machine can run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kernels.native.build import build
from kernels.native.library import NativeKernels
from tests.instruction_sets import RUNNABLE

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache like a user's, where each set is compiled once for all tests, whichever process they run in."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"


@pytest.fixture(scope="session")
def compiled(cache_home: Path) -> Path:
    return cache_home / "orca" / "kernels"


@pytest.fixture(scope="session", params=RUNNABLE, ids=lambda chosen: chosen.name)
def kernels(request: pytest.FixtureRequest, compiled: Path) -> NativeKernels:
    return NativeKernels(build(request.param, compiled), request.param.name)
