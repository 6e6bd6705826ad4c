from __future__ import annotations

from typing import Any

import pytest
from google.rpc import error_details_pb2, status_pb2

from shared.errors import InvalidRequestError, OrcaError, OverloadedError, UnauthenticatedError
from shared.failure_details import failure_metadata, retry_after_s


def status_and_details(error: OrcaError) -> tuple[Any, dict[str, Any]]:
    """What a client with the standard details sees."""
    metadata = dict(failure_metadata(error))
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    found = {}
    for packed in status.details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo, error_details_pb2.BadRequest):
            detail = kind()
            if packed.Unpack(detail):
                found[kind.__name__] = detail
    return status, found


def test_every_failure_names_its_kind() -> None:
    status, details = status_and_details(UnauthenticatedError("no key"))
    assert (status.code, status.message) == (16, "no key")
    assert set(details) == {"ErrorInfo"}
    assert (details["ErrorInfo"].reason, details["ErrorInfo"].domain) == ("UnauthenticatedError", "orca")


def test_overload_says_when_to_try_again_twice() -> None:
    error = OverloadedError("full", retry_after_s=2.5)
    _, details = status_and_details(error)
    assert details["RetryInfo"].retry_delay.ToMilliseconds() == 2500
    assert ("retry-after-ms", "2500") in failure_metadata(error)
    assert ("retry-after-ms", "1000") in failure_metadata(OverloadedError("full"))


def test_a_field_that_is_wrong_is_named() -> None:
    _, details = status_and_details(InvalidRequestError("top_p is 2", field="top_p"))
    (violation,) = details["BadRequest"].field_violations
    assert (violation.field, violation.description) == ("top_p", "top_p is 2")
    assert "BadRequest" not in status_and_details(InvalidRequestError("no"))[1]


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1500", 1.5), ("", None), ("soon", None), ("-1", None), (b"1", None), ("9" * 5000, 999999.999)],
)
def test_whatever_a_peer_says_is_read_safely(value: str | bytes, expected: float | None) -> None:
    assert retry_after_s([("other", "1"), ("retry-after-ms", value)]) == expected
