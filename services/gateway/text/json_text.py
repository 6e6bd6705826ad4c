"""JSON that clients send as text: schemas and arguments. Reads it, and refuses what is nested too deeply to be written.

Whoever walks a nested value, Python's encoder and templates among them, goes as deep as it does.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["MAX_JSON_DEPTH", "check_depth", "parse_json"]

MAX_JSON_DEPTH = 256


def parse_json(text: str) -> Any:
    """Return the value. Raises ``ValueError`` where it is no JSON, or nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raise ``ValueError`` where lists and objects are nested too deeply."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_JSON_DEPTH):
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, dict | list)
        ]
    if level:
        raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MAX_JSON_DEPTH} levels deep")
