"""API keys: the check of what a caller presents, against a file that is read again when it changes.

`Authenticator.authenticate` gets the value of an ``Authorization`` header, which is the same for every protocol. Only
hashes of secrets are kept in memory. What stands in the file is `key_file`'s to know.
"""

from __future__ import annotations

import asyncio
import hmac
from typing import TYPE_CHECKING

from services.gateway.clients import ANONYMOUS
from services.gateway.key_file import parse_keys, secret_hash
from shared.errors import ConfigError, UnauthenticatedError
from shared.log import get_logger

if TYPE_CHECKING:
    from pathlib import Path
    from typing import NoReturn

    from services.gateway.clients import Client

__all__ = ["Authenticator"]

MAX_FILE_BYTES = 1 << 20
_POLL_S = 1.0
"""How soon a changed file counts."""


class Authenticator:
    """Knows who may call. Without a file everybody may, as one anonymous client."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the keys. Raises ``ConfigError`` where the file cannot be read or understood."""
        self._path = path
        self._clients: dict[bytes, Client] = {}
        self._seen: tuple[int, ...] | None = None
        if path is not None:
            # First what it looks like: a change in between is then seen at the next look.
            self._seen = _look(path)
            self._clients = _read(path)

    @property
    def requires_key(self) -> bool:
        """Whether a call without a key is refused."""
        return self._path is not None

    def authenticate(self, authorization: str | None) -> Client:
        """Return whose key stands in an ``Authorization`` header's value.

        It takes as long for a key that is nearly right as for one that is all wrong.

        Raises:
            UnauthenticatedError: there is none, or nobody's.
        """
        if self._path is None:
            return ANONYMOUS
        if authorization is None:
            raise UnauthenticatedError("an API key is required: send it as 'Authorization: Bearer KEY'")
        scheme, _, secret = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise UnauthenticatedError("the authorization must be of the form 'Bearer KEY'")
        presented = secret_hash(secret.strip())
        found: Client | None = None
        for known, client in self._clients.items():
            if hmac.compare_digest(known, presented):
                found = client
        if found is None:
            raise UnauthenticatedError("the API key is not one that this gateway knows")
        return found

    def reload_if_changed(self) -> bool:
        """Read the file again where it is another than last time; True when its keys now count.

        One that cannot be read or understood is logged, and the keys of before stay. Blocks on the file.
        """
        if self._path is None or (seen := _look(self._path)) == self._seen:
            return False
        self._seen = seen
        try:
            self._clients = _read(self._path)
        except ConfigError as error:
            get_logger().error("api_keys_not_loaded", message=str(error), advice="the keys of before stay")
            return False
        get_logger().info("api_keys_loaded", num_keys=len(self._clients))
        return True

    async def run(self) -> NoReturn:
        """Look at the file again and again."""
        while True:
            await asyncio.sleep(_POLL_S)
            await asyncio.to_thread(self.reload_if_changed)


def _look(path: Path) -> tuple[int, ...] | None:
    """Return what changes when the file does; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read(path: Path) -> dict[bytes, Client]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--api-keys {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--api-keys {path} is not UTF-8 text (byte {error.start})") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"--api-keys {path} has more than {MAX_FILE_BYTES} bytes")
    return parse_keys(text, origin=f"--api-keys {path}")
