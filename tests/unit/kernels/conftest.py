"""The compiled kernels, for each instruction set that this machine can run."""

from __future__ import annotations

import pytest

from kernels.native.build import build
from kernels.native.library import NativeKernels
from tests.instruction_sets import RUNNABLE


@pytest.fixture(scope="session", params=RUNNABLE, ids=lambda chosen: chosen.name)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    return NativeKernels(build(request.param, tmp_path_factory.mktemp("kernels")), request.param.name)
