"""Calling a gateway from a command: failures that say what to do."""

import contextlib
from collections.abc import Iterator

from shared.config import check_address
from shared.errors import UnauthenticatedError, UnavailableError

__all__ = ["told_plainly"]

_ADVICE = {
    "CERTIFICATE_VERIFY_FAILED": "the certificate of {address} is of no authority that is trusted here: name its "
    "authority with --tls-ca",
    "Hostname Verification Check failed": "the certificate of {address} is that of another host: call it by a name "
    "that stands in it",
    "WRONG_VERSION_NUMBER": "{address} does not speak TLS: leave out --tls and --tls-ca",
    "Socket closed": "what listens at {address} closes the connection: it may want TLS (--tls, --tls-ca), or a "
    "certificate of yours (--client-cert, --client-key)",
    **dict.fromkeys(
        ("failed to connect", "DNS resolution failed", "errors resolving", "Connection refused"),
        "no gateway answers at {address}: start a mesh with `orca up`, or name another address with {option}",
    ),
}
"""By what the library says of a connection that failed; the first that is found counts."""


@contextlib.contextmanager
def told_plainly(address: str, *, option: str = "--address", key_variable: str = "ORCA_API_KEY") -> Iterator[None]:
    """Replace the library's account of a connection that failed by what the user can do about it.

    ``option`` is the one that names the address, ``key_variable`` the environment's variable of the key.
    """
    check_address("address", address)
    try:
        yield
    except UnauthenticatedError as error:
        raise UnauthenticatedError(f"{error}; give yours in {key_variable}, or with --api-key") from error
    except UnavailableError as error:
        for sign, advice in _ADVICE.items():
            if sign in str(error):
                raise UnavailableError(advice.format(address=address, option=option)) from error
        raise
