"""gRPC status codes by number and name, for code that must not import gRPC: the scheduler's core above all."""

from __future__ import annotations

import enum

__all__ = ["StatusCode"]


class StatusCode(enum.IntEnum):
    """The standard codes; ``shared.rpc`` translates to and from the library's own enum."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16
