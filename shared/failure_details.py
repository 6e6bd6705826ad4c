"""What a failed call tells beside status and message: ``google.rpc`` error details in the trailing metadata.

Any client that knows the standard details reads them; ours does, too. ``retry-after-ms`` is there as plain metadata as
well, for those that do not. Knows errors, not calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from google.protobuf import any_pb2, message
from google.rpc import error_details_pb2, status_pb2

from shared.errors import InvalidRequestError, OverloadedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shared.errors import OrcaError

    Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

__all__ = ["RETRY_AFTER_KEY", "failure_metadata", "retry_after_s"]

RETRY_AFTER_KEY = "retry-after-ms"
"""Trailing metadata of RESOURCE_EXHAUSTED: when to try again, milliseconds."""

_DETAILS_KEY = "grpc-status-details-bin"
_DOMAIN = "orca"
_DEFAULT_RETRY_AFTER_S = 1.0


def failure_metadata(error: OrcaError) -> Metadata:
    """Return the trailing metadata of a call that ends with ``error``."""
    details: list[message.Message] = [error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=_DOMAIN)]
    plain: Metadata = ()
    if isinstance(error, OverloadedError):
        retry = error_details_pb2.RetryInfo()
        retry_ms = round(1000 * (error.retry_after_s or _DEFAULT_RETRY_AFTER_S))
        retry.retry_delay.FromMilliseconds(retry_ms)
        details.append(retry)
        plain = ((RETRY_AFTER_KEY, str(retry_ms)),)
    elif isinstance(error, InvalidRequestError) and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=str(error))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    status = status_pb2.Status(code=error.code, message=str(error))
    for detail in details:
        status.details.append(_packed(detail))
    return (*plain, (_DETAILS_KEY, status.SerializeToString()))


def retry_after_s(metadata: Iterable[tuple[str, str | bytes]]) -> float | None:
    """Return when the other side says to try again; None where it does not, or nothing that can be read."""
    for key, value in metadata:
        if key == RETRY_AFTER_KEY and isinstance(value, str) and value.isdecimal():
            return int(value[:9]) / 1000
    return None


def _packed(detail: message.Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
