"""Calling a gateway from a command: failures that say what to do, options as the client wants them."""

import contextlib
from collections.abc import Iterator

from shared.config import check_address
from shared.errors import UnavailableError

__all__ = ["DEFAULT_ADDRESS", "told_plainly"]

DEFAULT_ADDRESS = "127.0.0.1:50051"
_NOBODY_THERE = ("failed to connect", "DNS resolution failed", "errors resolving", "Connection refused")


@contextlib.contextmanager
def told_plainly(address: str) -> Iterator[None]:
    """Replace the library's account of a connection that failed by what the user can do about it."""
    check_address("address", address)
    try:
        yield
    except UnavailableError as error:
        if any(sign in str(error) for sign in _NOBODY_THERE):
            raise UnavailableError(
                f"no gateway answers at {address}: start a mesh with `orca up`, or name another address with --address"
            ) from error
        raise
