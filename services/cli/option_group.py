"""Options that are written once and taken by several commands, which get them as one object."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["taking"]


def taking(
    command: Callable[..., None], into: str, parameters: Sequence[inspect.Parameter], build: Callable[..., object]
) -> Callable[..., None]:
    """Give a command ``parameters`` in place of its parameter ``into``, which gets what ``build`` makes of them."""
    names = [parameter.name for parameter in parameters]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        built = build(**{name: given.pop(name) for name in names})
        command(**{into: built}, **given)

    all_parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for own in inspect.signature(command).parameters.values()
        for parameter in (parameters if own.name == into else [own])
    ]
    # Typer reads both.
    wrapped.__signature__ = inspect.Signature(all_parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in all_parameters}
    return wrapped
