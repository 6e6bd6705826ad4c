"""From the bytes of a request's body to a checked object, or a refusal that names the field.

The body is never larger in memory than the limit: one that is announced to be is refused unread, one that turns out to
be is cut off. What it holds is counted before it is built (`body_size`), and large bodies are built one at a time, off
the event loop: neither memory nor anybody's tokens depend on how many come. Its JSON is strict: no NaN, no trailing
commas, no lone surrogates.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from typing import TYPE_CHECKING, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from services.gateway.http.body_size import overload
from services.gateway.http.chat_body import ROLES
from services.gateway.http.errors import HttpError

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["BodyReader"]

_MEDIA_TYPE = re.compile(r"application/json\s*(;.*)?", re.IGNORECASE)
_THREAD_BYTES = 64 << 10
"""Parsing more than this takes long enough to be felt by those who wait for tokens: it goes to a thread."""

_Model = TypeVar("_Model", bound=BaseModel)


class BodyReader:
    """Reads and checks bodies of at most ``max_bytes``, which must come within ``timeout_s``."""

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._large_turn = asyncio.Lock()

    async def read(self, request: Request, model: type[_Model]) -> _Model:
        """Return the body as ``model``.

        Raises:
            HttpError: it is too large, too slow, no JSON, or not what the model wants.
            ClientDisconnect: the client left before the end.
        """
        # Not even a missing type will do: a browser asks first before it sends JSON to another origin, and only JSON.
        if not _MEDIA_TYPE.fullmatch(request.headers.get("content-type", "").strip()):
            raise HttpError(415, "the body must be JSON: send it as Content-Type: application/json")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise HttpError(415, "the body must not be compressed: send it without Content-Encoding")
        try:
            async with asyncio.timeout(self._timeout_s):
                data = await self._collect(request)
        except TimeoutError:
            message = f"the body did not come within {self._timeout_s:g} seconds"
            raise HttpError(408, message, "timeout_error", code="timeout") from None
        if len(data) > _THREAD_BYTES:
            async with self._large_turn:
                return await asyncio.to_thread(_parse, data, model)
        return _parse(data, model)

    async def _collect(self, request: Request) -> bytearray:
        announced = request.headers.get("content-length")
        if announced is not None and int(announced) > self._max_bytes:
            raise self._too_large(announced)
        data = bytearray()
        more = True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            data += message["body"]
            more = message["more_body"]
            if len(data) > self._max_bytes:
                raise self._too_large("more")
        return data

    def _too_large(self, size: str) -> HttpError:
        return HttpError(
            413,
            f"the body has {size} bytes; at most {self._max_bytes} are allowed (--max-body-bytes)",
            code="request_too_large",
        )


def _parse(data: bytearray, model: type[_Model]) -> _Model:
    excess = overload(data)
    if excess is not None:
        raise HttpError(413, f"the body has {excess}, which is the most that is allowed", code="request_too_large")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise HttpError(400, f"the body is no valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise HttpError(400, "the body must be a JSON object", code="invalid_json")
    try:
        return model.model_validate(value)
    except ValidationError as errors:
        raise _refusal(errors) from None


def _refusal(errors: ValidationError) -> HttpError:
    """Tell of the first thing that is wrong: most often the others follow from it."""
    error = errors.errors(include_url=False, include_input=False, include_context=False)[0]
    param = _path(error["loc"])
    match error["type"]:
        case "extra_forbidden":
            return HttpError(400, f"Unrecognized request argument supplied: {param}", param=param, code="unknown_field")
        case "missing":
            return HttpError(400, f"{param} is missing", param=param, code="missing_required_parameter")
        case "union_tag_invalid" | "union_tag_not_found":
            message = "it must be 'system', 'developer', 'user', 'assistant' or 'tool'"
            param += ".role"
        case "model_type" | "model_attributes_type" | "dict_type":
            message = "it must be a JSON object"
        case _:
            message = error["msg"].replace("Input should", "it should")
    return HttpError(400, f"{param}: {message}", param=param, code="invalid_value")


def _path(location: tuple[int | str, ...]) -> str:
    """``messages[0].content`` of its parts; by which of the roles' models it was read is no part of it."""
    path = ""
    for before, part in itertools.pairwise((None, *location)):
        if isinstance(part, int):
            path += f"[{part}]"
        elif not (isinstance(before, int) and part in ROLES):
            path += f".{part}" if path else str(part)
    return path
