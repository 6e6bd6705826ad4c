"""One public function for each operation, which runs the version made for the device that its tensors are on."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["by_device"]

_Rest = ParamSpec("_Rest")
_Result = TypeVar("_Result")


def by_device(
    reference: Callable[Concatenate[Tensor, _Rest], _Result],
    **versions: Callable[Concatenate[Tensor, _Rest], _Result] | str,
) -> Callable[Concatenate[Tensor, _Rest], _Result]:
    """Return ``reference`` as a function that runs the version for the device of its first tensor where there is one.

    ``versions`` are named by torch's types of devices ("cpu", "cuda"). A version whose module imports what not every
    machine has, as Triton's do, is given as the module's name, which is imported at the first call on such a device;
    the function is called there as the reference is.
    """

    @functools.cache
    def version(device: str) -> Callable[Concatenate[Tensor, _Rest], _Result]:
        found = versions.get(device, reference)
        if isinstance(found, str):
            found = getattr(import_module(found), reference.__name__)
        return cast("Callable[Concatenate[Tensor, _Rest], _Result]", found)

    @functools.wraps(reference)
    def operation(first: Tensor, /, *rest: _Rest.args, **named: _Rest.kwargs) -> _Result:
        return version(first.device.type)(first, *rest, **named)

    return operation
