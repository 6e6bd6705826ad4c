"""Values of options, from their text.

What is no such value is refused with ``typer.BadParameter``, which Typer completes with the name of the option.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import typer

__all__ = [
    "file_text",
    "json_schema",
    "logit_bias",
    "non_empty",
    "number",
    "switch",
    "token_id",
    "token_ids",
    "whole_number",
]

MAX_FILE_BYTES = 1 << 20
_MAX_TOKEN_ID = 2**32 - 1
_MAX_LOGIT_BIAS = 100


def number(low: float, high: float, *, above: bool = False) -> Callable[[str], float]:
    """A number from ``low`` to ``high``; ``above`` leaves ``low`` itself out."""
    allowed = f"a number above {low:g} and up to {high:g}" if above else f"a number from {low:g} to {high:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or (above and value == low):  # nan is in no range
            raise typer.BadParameter(f"{text!r} is not {allowed}")
        return value

    return parse


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """A whole number from ``low`` to ``high``."""

    def parse(text: str) -> int:
        # int() knows more spellings, and takes its time with very long ones.
        value = int(text) if text.strip().isdecimal() and len(text) <= len(str(high)) + 8 else -1
        if not low <= value <= high:
            raise typer.BadParameter(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return parse


token_id = whole_number(0, _MAX_TOKEN_ID)


def token_ids(text: str) -> list[int]:
    """Token ids with commas or blanks between them."""
    ids = [token_id(part) for part in text.replace(",", " ").split()]
    if not ids:
        raise typer.BadParameter("there is no token id; write for example 1,2,3")
    return ids


def logit_bias(text: str) -> tuple[int, float]:
    """``ID=VALUE``: a token and what is added to its logit."""
    name, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} is not ID=VALUE; write for example 42=-100")
    return token_id(name), number(-_MAX_LOGIT_BIAS, _MAX_LOGIT_BIAS)(value)


def non_empty(text: str) -> str:
    """Any text but the empty one."""
    if not text:
        raise typer.BadParameter("the text is empty")
    return text


def switch(text: str) -> bool:
    """``on`` or ``off``."""
    if text not in {"on", "off"}:
        raise typer.BadParameter(f"{text!r} is neither on nor off")
    return text == "on"


def file_text(path: str) -> str:
    """Text of a small file."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot read {path!r}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise typer.BadParameter(f"{path!r} has more than {MAX_FILE_BYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{path!r} is not UTF-8 text (byte {error.start})") from error


def json_schema(text: str) -> str:
    """A JSON schema: the text itself where it begins like a JSON object, else what the file of that name has."""
    schema = text if text.lstrip().startswith("{") else file_text(text)
    try:
        is_object = isinstance(json.loads(schema), dict)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"the schema is not JSON: {error}") from error
    if not is_object:
        raise typer.BadParameter("the schema is not a JSON object")
    return schema
