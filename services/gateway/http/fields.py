"""Types of request fields: what pydantic's own types do not say, and the base of all bodies.

Values are taken as they are, never converted: ``"5"`` and ``1.0`` are no integers. Every optional field may be null,
which is the same as leaving it out.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError, core_schema

from services.gateway.admission import MAX_STOP_STRINGS
from services.gateway.text.json_text import check_depth

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

__all__ = [
    "Body",
    "Items",
    "JsonSchema",
    "JsonSchemaOrText",
    "Only",
    "OnlyFalse",
    "OnlyNull",
    "OnlyTrue",
    "Prompts",
    "Stop",
    "TokenIds",
]


_T = TypeVar("_T")


class _FirstFaultOnly:
    """pydantic's ``FailFast``, which cannot be hashed, hence not be part of a union."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return cast("CoreSchema", {**handler(source), "fail_fast": True})


Items = Annotated[list[_T], _FirstFaultOnly()]
"""A list whose first faulty item is told: a client may send a million of them."""


class Body(BaseModel):
    """A JSON object whose fields are all known."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Only:
    """Marks a field that is known but not supported: null and ``values``, which ask for nothing, are accepted."""

    def __init__(self, *values: Any) -> None:
        self._values = values

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        del source, handler
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        del schema, handler
        return {"enum": [None, *self._values], "description": "Not supported: only what asks for nothing is accepted."}

    def _check(self, value: Any) -> Any:
        if value is None or any(type(value) is type(known) and value == known for known in self._values):
            return value
        accepted = " or ".join(["null", *(json.dumps(known) for known in self._values)])
        raise PydanticCustomError(
            "unsupported", "it is not supported here; leave it out, or send {accepted}", {"accepted": accepted}
        )


def limited(**limits: float) -> Any:
    """Return an optional field whose limits, in JSON Schema's words, are checked by the gateway's admission."""
    return Field(default=None, json_schema_extra=dict(limits))


def _token_ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise PydanticCustomError("token_ids", "it must be a list of token ids, which are integers")
    return value


def _json_schema(value: Any) -> str:
    if not isinstance(value, dict):
        raise PydanticCustomError("json_schema", "it must be a JSON schema, which is an object")
    try:
        check_depth(value)
    except ValueError as error:
        raise PydanticCustomError("json_schema", "{reason}", {"reason": str(error)}) from None
    # The standard library's, since a schema may have integers of any size.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _json_schema_or_text(value: Any) -> str:
    return value if isinstance(value, str) else _json_schema(value)


def _prompts(value: Any) -> list[str | list[int]]:
    """Texts and ids, one for each prompt."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        if not value:
            raise PydanticCustomError("prompt", "it is empty; send at least one prompt")
        kinds = set(map(type, value))
        if kinds == {int}:
            return [value]
        if kinds == {str}:
            return value
        if kinds == {list} and all(set(map(type, ids)) <= {int} for ids in value):
            return value
    raise PydanticCustomError(
        "prompt", "it must be a text, a list of texts, a list of token ids, or a list of lists of token ids"
    )


def _stop(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not set(map(type, texts)) <= {str}:
        raise PydanticCustomError("stop", "it must be a text or a list of texts")
    return tuple(texts)


OnlyNull = Annotated[Any, Only()]
OnlyFalse = Annotated[Any, Only(False)]  # noqa: FBT003 - the value itself
OnlyTrue = Annotated[Any, Only(True)]  # noqa: FBT003 - the value itself

_IDS_SCHEMA: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}

_OBJECT: dict[str, Any] = {"type": "object"}

JsonSchema = Annotated[str, PlainValidator(_json_schema), WithJsonSchema(_OBJECT)]
"""A JSON schema, kept as text."""

JsonSchemaOrText = Annotated[
    str, PlainValidator(_json_schema_or_text), WithJsonSchema({"anyOf": [_OBJECT, {"type": "string"}]})
]
"""A JSON schema or its text, kept as text."""

TokenIds = Annotated[list[int], PlainValidator(_token_ids), WithJsonSchema(_IDS_SCHEMA)]

Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"type": "string"}},
                {"minItems": 1, **_IDS_SCHEMA},
                {"type": "array", "minItems": 1, "items": {"minItems": 1, **_IDS_SCHEMA}},
            ]
        }
    ),
]

Stop = Annotated[
    tuple[str, ...] | None,
    PlainValidator(_stop),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": {"type": "string"}},
                {"type": "null"},
            ]
        }
    ),
]
