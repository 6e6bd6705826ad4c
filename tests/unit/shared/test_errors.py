from __future__ import annotations

import re

import pytest
from grpc import StatusCode as GrpcStatusCode
from grpc import aio

from shared import errors
from shared.failure_details import failure_metadata
from shared.rpc import bound_address, error_from_rpc, error_of, grpc_status
from shared.status import StatusCode

KINDS = [getattr(errors, name) for name in errors.__all__]


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = re.findall(r"(\w+Error)\s+([A-Z_]+)", errors.__doc__ or "")
    assert {name: StatusCode[code] for name, code in drawn} == {kind.__name__: kind.code for kind in KINDS}


def test_codes_are_those_of_the_library() -> None:
    assert {code.name: code.value for code in StatusCode} == {code.name: code.value[0] for code in GrpcStatusCode}
    assert all(grpc_status(code).name == code.name for code in StatusCode)


@pytest.mark.parametrize(
    "kind",
    [
        errors.InvalidRequestError,
        errors.ModelNotFoundError,
        errors.AlreadyClaimedError,
        errors.OverloadedError,
        errors.UnauthenticatedError,
        errors.UnavailableError,
    ],
)
def test_errors_come_back_as_what_they_were(kind: type[errors.OrcaError]) -> None:
    assert type(error_of(kind.code, "why")) is kind


@pytest.mark.parametrize("code", [code for code in StatusCode if code is not StatusCode.OK])
def test_no_status_is_lost(code: StatusCode) -> None:
    error = error_of(code, "why")
    assert error.code is code
    assert str(error) == "why"


@pytest.mark.parametrize(("details", "said"), [("full", "gateway: full"), ("", "gateway: RESOURCE_EXHAUSTED")])
def test_a_failed_call_names_the_peer(details: str, said: str) -> None:
    failure = aio.AioRpcError(GrpcStatusCode.RESOURCE_EXHAUSTED, aio.Metadata(), aio.Metadata(), details)
    error = error_from_rpc(failure, "gateway")
    assert isinstance(error, errors.OverloadedError)
    assert str(error) == said


@pytest.mark.parametrize(
    ("host", "address"), [("127.0.0.1", "127.0.0.1:5"), ("::1", "[::1]:5"), ("[::1]", "[::1]:5"), ("node", "node:5")]
)
def test_addresses(host: str, address: str) -> None:
    assert bound_address(host, 5) == address


def test_what_is_too_large_is_not_taken_for_overload() -> None:
    details = "Received message larger than max (70000000 vs. 67108864)"
    failure = aio.AioRpcError(GrpcStatusCode.RESOURCE_EXHAUSTED, aio.Metadata(), aio.Metadata(), details)
    assert isinstance(error_from_rpc(failure, "gateway"), errors.InvalidRequestError)


def test_overload_says_when_to_try_again() -> None:
    trailing = aio.Metadata(*failure_metadata(errors.OverloadedError("full", retry_after_s=2.5)))
    failure = aio.AioRpcError(GrpcStatusCode.RESOURCE_EXHAUSTED, aio.Metadata(), trailing, "full")
    error = error_from_rpc(failure, "gateway")
    assert isinstance(error, errors.OverloadedError)
    assert error.retry_after_s == 2.5
