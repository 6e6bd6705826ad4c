"""The OpenAPI document of the front, made of the same table as its routes.

It stands at ``/openapi.json`` and is all that tools need; there is no page that shows it, since such pages load their
scripts from elsewhere.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic.json_schema import models_json_schema
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.http.responses import ErrorAnswer
from services.gateway.http.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from pydantic import BaseModel
    from pydantic.json_schema import JsonSchemaMode
    from starlette.requests import Request

__all__ = ["Endpoint", "OpenApi"]

_PATH_PARAMETER = re.compile(r"{(\w+)(:\w+)?}")
_ERROR = "A refusal or a failure, its status as HTTP has it."


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address, what serves it, and what its bodies are."""

    method: str
    path: str
    """As Starlette writes it."""
    handler: Callable[[Request], Awaitable[Response]]
    """Its docstring is the summary."""
    answer: type[BaseModel]
    body: type[BaseModel] | None = None
    event: type[BaseModel] | None = None
    """One event of a stream, where the answer may be one."""
    is_open: bool = False
    """Needs no API key."""

    @property
    def route(self) -> Route:
        """The route."""
        return Route(self.path, self.handler, methods=[self.method])


class OpenApi:
    """The document of some endpoints, made when it is first asked for."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = endpoints
        self._document: bytes | None = None

    async def document(self, request: Request) -> Response:
        """Return this document."""
        del request
        if self._document is None:
            self._document = json.dumps(self._make(), ensure_ascii=False).encode()
        return Response(self._document, media_type="application/json")

    def _make(self) -> dict[str, Any]:
        modes: dict[type[BaseModel], JsonSchemaMode] = {ErrorAnswer: "serialization"}
        for endpoint in self._endpoints:
            modes |= {model: "serialization" for model in (endpoint.answer, endpoint.event) if model is not None}
            modes |= {} if endpoint.body is None else {endpoint.body: "validation"}
        refs, definitions = models_json_schema(list(modes.items()), ref_template="#/components/schemas/{model}")
        schema = {model: refs[model, mode] for model, mode in modes.items()}
        paths: dict[str, dict[str, Any]] = {}
        for endpoint in self._endpoints:
            path = _PATH_PARAMETER.sub(r"{\1}", endpoint.path)
            paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, schema)
        return {
            "openapi": "3.1.0",
            "info": {
                "title": "Orca mesh",
                "version": VERSION,
                "description": "OpenAI's API, as far as a text model goes, with vLLM's options beside it.",
            },
            "paths": paths,
            "components": {
                "schemas": definitions["$defs"],
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{"key": []}, {}],
        }


def _operation(endpoint: Endpoint, schema: dict[type[BaseModel], Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema[endpoint.answer]}}
    if endpoint.event is not None:
        content["text/event-stream"] = {"schema": schema[endpoint.event]}
    operation: dict[str, Any] = {
        "operationId": endpoint.handler.__name__,
        "summary": (endpoint.handler.__doc__ or "").partition("\n")[0],
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {"description": _ERROR, "content": {"application/json": {"schema": schema[ErrorAnswer]}}},
        },
    }
    if endpoint.is_open:
        operation["security"] = []
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema[endpoint.body]}},
        }
    if names := _PATH_PARAMETER.findall(endpoint.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name, _ in names
        ]
    return operation
