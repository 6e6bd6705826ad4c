"""Failures as HTTP statuses with OpenAI's error object: ``{"error": {"message", "type", "param", "code"}}``.

Knows which status a gRPC code is over HTTP, and which name a field of the contract has there.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from shared.errors import InvalidRequestError, OrcaError, OverloadedError
from shared.log import get_logger
from shared.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["HttpError", "error_response", "http_error_of"]

_DEFAULT_RETRY_AFTER_S = 1

_INVALID = "invalid_request_error"
_KINDS: dict[StatusCode, tuple[int, str, str | None]] = {
    StatusCode.CANCELLED: (503, "server_error", "cancelled"),
    StatusCode.INVALID_ARGUMENT: (400, _INVALID, None),
    StatusCode.FAILED_PRECONDITION: (400, _INVALID, None),
    StatusCode.OUT_OF_RANGE: (400, _INVALID, None),
    StatusCode.DEADLINE_EXCEEDED: (408, "timeout_error", "timeout"),  # the time is the client's own
    StatusCode.NOT_FOUND: (404, _INVALID, "not_found"),
    StatusCode.PERMISSION_DENIED: (403, "permission_error", "permission_denied"),
    StatusCode.UNAUTHENTICATED: (401, _INVALID, "invalid_api_key"),
    StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    StatusCode.UNIMPLEMENTED: (501, "server_error", "unimplemented"),
    StatusCode.UNAVAILABLE: (503, "server_error", "service_unavailable"),
}
_INTERNAL = (500, "server_error", "internal_error")

_FIELDS: dict[str, str | None] = {
    "prompts": "prompt",
    "text": "prompt",
    "token_ids": "tokens",
    "timeout_s": "timeout",
    "num_logprobs": "logprobs",
    "guidance": None,
}
"""Fields that have another name over HTTP, or several, and then none."""
_OTHER_NAME = re.compile(r"\b(?:timeout_s|num_logprobs)\b")
"""Those whose name in a message can mean nothing else."""


class HttpError(Exception):
    """A refusal or a failure as the client sees it."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = _INVALID,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> bytes:
        """Return the error object as JSON."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})


def http_error_of(error: Exception) -> HttpError:
    """Return what a client is told of a failure; what is not ours is logged with its traceback and stays hidden."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, HTTPException):
        return _of_router(error)
    if not isinstance(error, OrcaError):
        get_logger().error("http_request_failed", exc_info=error)
        return HttpError(500, "internal error; the service's log has the details", "server_error", code=_INTERNAL[2])
    status, kind, code = _KINDS.get(error.code, _INTERNAL)
    message = _OTHER_NAME.sub(lambda name: str(_FIELDS[name[0]]), str(error))
    headers = {}
    if status in {429, 503}:
        retry_after_s = error.retry_after_s if isinstance(error, OverloadedError) else None
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s or _DEFAULT_RETRY_AFTER_S)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return HttpError(status, message, kind, param=_param_of(error), code=code, headers=headers)


def error_response(error: HttpError) -> Response:
    """Return the response that tells of an error."""
    return Response(error.body(), error.status, error.headers, media_type="application/json")


def _of_router(error: HTTPException) -> HttpError:
    if error.status_code == 404:
        return HttpError(404, "there is nothing at this address", code="unknown_url")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return HttpError(
            405, f"this address knows {allowed} only", code="method_not_allowed", headers={"allow": allowed}
        )
    return HttpError(error.status_code, error.detail, headers=error.headers or {})


def _param_of(error: OrcaError) -> str | None:
    """Return the field that is wrong, path and all, by its name over HTTP."""
    if not isinstance(error, InvalidRequestError) or error.field is None:
        return None
    name = re.match(r"\w*", error.field)
    assert name is not None
    shown = _FIELDS.get(name[0], name[0])
    return None if shown is None else shown + error.field[name.end() :]
