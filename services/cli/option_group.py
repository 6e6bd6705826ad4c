"""Options that are written once and taken by several commands, which get them as one object."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["taking"]


def taking(
    command: Callable[..., None], parameters: Sequence[inspect.Parameter], build: Callable[..., object]
) -> Callable[..., None]:
    """Give a command ``parameters`` in place of its first one, which gets what ``build`` makes of them."""
    _, *own_parameters = inspect.signature(command).parameters.values()
    names = [parameter.name for parameter in parameters]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        built = build(**{name: given.pop(name) for name in names})
        command(built, **given)

    all_parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*parameters, *own_parameters)
    ]
    # Typer reads both.
    wrapped.__signature__ = inspect.Signature(all_parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in all_parameters}
    return wrapped
