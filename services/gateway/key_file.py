"""The file of API keys, one a line.

A word that begins with ``#`` begins a comment::

    # name   secret                   options
    alice    sha256:9f86d081884c…     weight=3
    bob      a-secret-as-it-is-sent   max_requests=64

A secret stands there as it is sent, or as the SHA-256 of that in hexadecimal. A name may have several secrets, each on
a line of its own with the same options, so that a key can be replaced without a gap. Messages never quote what may be a
secret. Pure: knows text, not files.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from dataclasses import dataclass, replace

from services.gateway.clients import Client
from shared.errors import ConfigError

__all__ = ["MAX_KEYS", "parse_keys", "secret_hash"]

MAX_KEYS = 1024
"""Every one of them is compared with for every call."""
MIN_SECRET_CHARACTERS = 16
MAX_SECRET_CHARACTERS = 512
MAX_WEIGHT = 1000.0
MAX_REQUESTS = 1 << 20

_LINE = "NAME SECRET [weight=N] [max_requests=N]"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_SECRET = re.compile(r"[\x21-\x7e]+")
_SHA256 = re.compile(r"sha256:([0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True)
class _Entry:
    digest: bytes
    client: Client
    line: int


def secret_hash(secret: str) -> bytes:
    """Return what is kept of a secret, and compared."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def parse_keys(text: str, *, origin: str) -> dict[bytes, Client]:
    """Return the clients by the hashes of their secrets; ``origin`` names the file in messages.

    Raises:
        ConfigError: something in it cannot be meant; the message has the number of the line.
    """
    entries: dict[bytes, _Entry] = {}
    by_name: dict[str, _Entry] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        words = list(itertools.takewhile(lambda word: word[0] != "#", line.split()))
        if not words:
            continue
        try:
            entry = _parse_line(words, number)
            _check_against_others(entry, entries.get(entry.digest), by_name.setdefault(entry.client.name, entry))
        except ConfigError as error:
            raise ConfigError(f"{origin}, line {number}: {error}") from None
        entries[entry.digest] = entry
    if not entries:
        raise ConfigError(f"{origin} has no key in it, so that nobody could call; a line is: {_LINE}")
    if len(entries) > MAX_KEYS:
        raise ConfigError(f"{origin} has {len(entries)} keys; at most {MAX_KEYS} are allowed")
    return {digest: entry.client for digest, entry in entries.items()}


def _check_against_others(entry: _Entry, same_secret: _Entry | None, namesake: _Entry) -> None:
    if same_secret is not None:
        raise ConfigError(f"the secret of {entry.client.name!r} stands in line {same_secret.line} already")
    if namesake.client != entry.client:
        raise ConfigError(f"{entry.client.name!r} has other options in line {namesake.line}; they must be the same")


def _parse_line(words: list[str], number: int) -> _Entry:
    name, *rest = words
    if not _NAME.fullmatch(name):
        raise ConfigError("the first word is not a name: that is 1 to 64 letters, digits and . _ @ -")
    if not rest:
        raise ConfigError(f"{name!r} has no secret; a line is: {_LINE}")
    secret, *options = rest
    digest = _digest(name, secret)
    client = Client(name)
    given: set[str] = set()
    for option in options:
        key, _, value = option.partition("=")
        client = _with_option(client, key, value)
        if key in given:
            raise ConfigError(f"{key} is given twice")
        given.add(key)
    return _Entry(digest, client, number)


def _digest(name: str, secret: str) -> bytes:
    if secret.startswith("sha256:"):
        hashed = _SHA256.fullmatch(secret)
        if hashed is None:
            raise ConfigError(f"the secret of {name!r}: after sha256: come 64 hexadecimal digits")
        return bytes.fromhex(hashed[1])
    if not _SECRET.fullmatch(secret):
        raise ConfigError(f"the secret of {name!r} has characters that no header carries; use printable ASCII")
    if not MIN_SECRET_CHARACTERS <= len(secret) <= MAX_SECRET_CHARACTERS:
        raise ConfigError(
            f"the secret of {name!r} has {len(secret)} characters; it must have from {MIN_SECRET_CHARACTERS} to "
            f"{MAX_SECRET_CHARACTERS} (`openssl rand -hex 32` makes a good one)"
        )
    return secret_hash(secret)


def _with_option(client: Client, key: str, value: str) -> Client:
    if key not in {"weight", "max_requests"}:
        raise ConfigError("after the secret come weight=N and max_requests=N, nothing else")
    try:
        number = float(value) if key == "weight" else int(value)
    except ValueError:
        raise ConfigError(f"{key} is {value!a}, which is no number") from None
    if key == "weight":
        if not 0 < number <= MAX_WEIGHT or not math.isfinite(number):
            raise ConfigError(f"weight is {value}; it must be above 0 and at most {MAX_WEIGHT:g}")
        return replace(client, weight=number)
    if not 1 <= number <= MAX_REQUESTS:
        raise ConfigError(f"max_requests is {value}; it must be between 1 and {MAX_REQUESTS}")
    return replace(client, max_requests=int(number))
