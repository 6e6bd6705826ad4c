"""What the output must match, as OpenAI and vLLM write it, and the `Guidance` that it stands for."""

from typing import Literal

from pydantic import Field

from services.gateway.http.errors import HttpError
from services.gateway.http.fields import Body, Items, JsonSchema, JsonSchemaOrText, OnlyFalse, OnlyNull
from shared.generation import Guidance, GuidanceKind

__all__ = ["ResponseFormat", "StructuredOutputs", "guidance_of"]


class JsonSchemaFormat(Body):
    """A JSON schema with a name."""

    name: str
    description: str | None = None
    schema_: JsonSchema | None = Field(default=None, alias="schema")
    strict: bool | None = None
    """Accepted either way: the output always matches the schema."""


class ResponseFormat(Body):
    """What the output must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """What the output must match, vLLM's way: one of these."""

    json_: JsonSchemaOrText | None = Field(default=None, alias="json")
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    """A context-free grammar in Lark's notation."""
    structural_tag: OnlyNull = None
    disable_fallback: OnlyFalse = None
    disable_any_whitespace: OnlyFalse = None
    disable_additional_properties: OnlyFalse = None
    whitespace_pattern: OnlyNull = None


_Found = list[tuple[str, Guidance]]
"""Fields that ask for guidance, and what they ask for."""


def guidance_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None, guided: StructuredOutputs
) -> tuple[str, Guidance] | None:
    """Return which field says what the output must match, and that.

    ``guided`` is what vLLM's fields ``guided_json`` and so on ask for.

    Raises:
        HttpError: several of them ask for something, or one of them is not whole.
    """
    found = [
        *_from_response_format(response_format),
        *_from_structured_outputs(structured_outputs, "structured_outputs."),
        *_from_structured_outputs(guided, "guided_"),
    ]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise HttpError(400, f"{names} exclude each other: choose one", param=found[1][0])
    return found[0] if found else None


def _from_response_format(wanted: ResponseFormat | None) -> _Found:
    if wanted is None:
        return []
    if wanted.type != "json_schema":
        if wanted.json_schema is not None:
            raise HttpError(
                400,
                f"response_format.json_schema is allowed with type 'json_schema' only, not {wanted.type!r}",
                param="response_format.json_schema",
            )
        return [] if wanted.type == "text" else [("response_format", Guidance(GuidanceKind.JSON_OBJECT))]
    if wanted.json_schema is None:
        raise HttpError(400, "response_format.json_schema is missing", param="response_format.json_schema")
    if wanted.json_schema.schema_ is None:
        return [("response_format", Guidance(GuidanceKind.JSON_OBJECT))]
    return [("response_format", Guidance(GuidanceKind.JSON_SCHEMA, wanted.json_schema.schema_))]


def _from_structured_outputs(wanted: StructuredOutputs | None, prefix: str) -> _Found:
    if wanted is None:
        return []
    found: _Found = []
    if wanted.json_ is not None:
        found.append((f"{prefix}json", Guidance(GuidanceKind.JSON_SCHEMA, wanted.json_)))
    if wanted.json_object:
        found.append((f"{prefix}json_object", Guidance(GuidanceKind.JSON_OBJECT)))
    if wanted.regex is not None:
        found.append((f"{prefix}regex", Guidance(GuidanceKind.REGEX, wanted.regex)))
    if wanted.choice is not None:
        found.append((f"{prefix}choice", Guidance(GuidanceKind.CHOICES, choices=tuple(wanted.choice))))
    if wanted.grammar is not None:
        found.append((f"{prefix}grammar", Guidance(GuidanceKind.GRAMMAR, wanted.grammar)))
    return found
