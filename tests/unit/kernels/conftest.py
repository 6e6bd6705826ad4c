"""The compiled kernels, for each instruction set that this machine can run."""

from __future__ import annotations

import pytest

from kernels.native.build import build, instruction_set
from kernels.native.library import NativeKernels
from tests.instruction_sets import RUNNABLE


@pytest.fixture(scope="session", params=RUNNABLE, ids=lambda flags: instruction_set(flags).name)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    chosen = instruction_set(request.param)
    return NativeKernels(build(chosen, tmp_path_factory.mktemp("kernels")), chosen.name)
