"""A version for another kind of device takes a module and a word; without one, the reference runs."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch

from kernels.dispatch import by_device

if TYPE_CHECKING:
    from torch import Tensor

X = torch.ones(2)
ELSEWHERE = torch.ones(2, device="meta")


def scaled(x: Tensor, factor: float = 1.0) -> str:
    """Say who was called."""
    return f"reference {factor}"


def scaled_on_cpu(x: Tensor, factor: float = 1.0) -> str:
    return f"cpu {factor}"


def test_the_first_tensor_decides() -> None:
    operation = by_device(scaled, cpu=scaled_on_cpu)
    assert operation(X, 2.0) == "cpu 2.0"
    assert operation(X, factor=3.0) == "cpu 3.0"
    assert operation(ELSEWHERE, 2.0) == "reference 2.0"
    assert operation.__doc__ == scaled.__doc__


def test_a_module_is_imported_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = by_device(scaled, cpu=scaled_on_cpu, meta="kernels_of_a_device")
    assert operation(X) == "cpu 1.0"
    with pytest.raises(ModuleNotFoundError):
        operation(ELSEWHERE)
    module = ModuleType("kernels_of_a_device")
    module.scaled = lambda x, factor=1.0: f"{x.device} {factor}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels_of_a_device", module)
    assert operation(ELSEWHERE, 4.0) == "meta 4.0"
