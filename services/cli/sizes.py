"""Sizes in bytes as people write them: ``512MiB``, ``1.5GB``, ``1073741824``."""

from __future__ import annotations

import re

__all__ = ["format_size", "parse_size"]

_FACTORS = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for ending, base in (("ib", 1024), ("b", 1000), ("", 1024))
}


def parse_size(text: str | int) -> int:
    """Number of bytes; raises ``ValueError`` for what is not a size."""
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,9})?)\s*([a-z]{0,3})\s*", str(text).lower())
    if match is None or match[2] not in _FACTORS:
        raise ValueError(f"{text!r} is not a size; write for example 512MiB, 1GiB or a number of bytes")
    return int(float(match[1]) * _FACTORS[match[2]]) if "." in match[1] else int(match[1]) * _FACTORS[match[2]]


def format_size(num_bytes: int) -> str:
    """Whole bytes, or one decimal of the largest binary unit that leaves at least 1."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    size = num_bytes / 1024
    for unit in ("KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
