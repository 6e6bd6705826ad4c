"""The errors that cross a service's seam, each with its gRPC status.

::

    OrcaError                       INTERNAL
    ├── InvalidRequestError         INVALID_ARGUMENT     the request can never succeed as it is
    ├── ModelError                  FAILED_PRECONDITION  the model cannot be found, read or run
    │   └── ModelNotFoundError      NOT_FOUND
    ├── ConfigError                 INVALID_ARGUMENT     the service was started with options that cannot work
    ├── AlreadyClaimedError         ALREADY_EXISTS       a second worker claims a rank that is taken
    ├── OverloadedError             RESOURCE_EXHAUSTED   try again later
    ├── DeadlineExceededError       DEADLINE_EXCEEDED    it took longer than the caller wanted to wait
    ├── UnauthenticatedError        UNAUTHENTICATED      no API key, or none that is known
    ├── UnavailableError            UNAVAILABLE          a neighbour is not there (yet)
    │   └── EngineLostError         UNAVAILABLE          the workers were lost in mid-flight
    └── ProtocolError               ABORTED              a peer broke the contract (a gap in step ids, a stale epoch)

Messages are for users: they say what is wrong and what to do about it.
"""

from __future__ import annotations

from shared.status import StatusCode

__all__ = [
    "AlreadyClaimedError",
    "ConfigError",
    "DeadlineExceededError",
    "EngineLostError",
    "InvalidRequestError",
    "ModelError",
    "ModelNotFoundError",
    "OrcaError",
    "OverloadedError",
    "ProtocolError",
    "UnauthenticatedError",
    "UnavailableError",
]


class OrcaError(Exception):
    """Base of all errors that a peer or a user may see."""

    code: StatusCode = StatusCode.INTERNAL


class InvalidRequestError(OrcaError):
    """The request can never succeed as it is; the message names the field and the limit."""

    code = StatusCode.INVALID_ARGUMENT

    def __init__(self, message: str, *, field: str | None = None) -> None:
        """``field`` is the field that is wrong, as the contract names it, where it is one."""
        super().__init__(message)
        self.field = field


class ModelError(OrcaError):
    """The model's files are damaged, incomplete or of a kind that is not supported."""

    code = StatusCode.FAILED_PRECONDITION


class ModelNotFoundError(ModelError):
    """No model has that name or path."""

    code = StatusCode.NOT_FOUND


class ConfigError(OrcaError):
    """The service was started with options that cannot work together."""

    code = StatusCode.INVALID_ARGUMENT


class AlreadyClaimedError(OrcaError):
    """A second worker claims a rank that another one holds."""

    code = StatusCode.ALREADY_EXISTS


class OverloadedError(OrcaError):
    """A bounded queue is full; the same request may succeed later."""

    code = StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        """``retry_after_s`` is when to try again, as far as that can be told."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(OrcaError):
    """The time that the caller gave was over first; the message says what was reached."""

    code = StatusCode.DEADLINE_EXCEEDED


class UnauthenticatedError(OrcaError):
    """The caller has not shown who it is."""

    code = StatusCode.UNAUTHENTICATED


class UnavailableError(OrcaError):
    """A neighbour is not there, or this service is leaving."""

    code = StatusCode.UNAVAILABLE


class EngineLostError(UnavailableError):
    """A worker died, hung or broke the contract; the epoch is over."""


class ProtocolError(OrcaError):
    """A peer broke the contract between the services."""

    code = StatusCode.ABORTED
