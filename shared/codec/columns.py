"""The one check that all columnar messages share."""

from __future__ import annotations

from shared.errors import ProtocolError

__all__ = ["check_columns"]


def check_columns(what: str, *columns: tuple[str, int]) -> None:
    """Refuse a message whose columns disagree in length."""
    if len({length for _, length in columns}) > 1:
        lengths = ", ".join(f"{name}: {length}" for name, length in columns)
        raise ProtocolError(f"{what} has columns of unequal length ({lengths})")
