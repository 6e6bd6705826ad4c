"""Where load goes, and what clients of every kind have in common: URLs, TLS, API key, models.

Speaks no protocol itself.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self
from urllib.parse import urlsplit

from shared.authentication import authorization_metadata
from shared.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.load.records import Reception
    from bench.load.traces import TraceRequest
    from shared.tls import TlsFiles

__all__ = ["Endpoint", "LoadClient", "ServedModel"]

_DEFAULT_PORTS = {"http": 80, "https": 443, "grpc": 50051, "grpcs": 50051}
_NO_ENDPOINT = "{url!r} is no endpoint: write for example http://127.0.0.1:8000 or grpc://127.0.0.1:50051"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server: ``http://`` and ``https://`` for OpenAI's API, ``grpc://`` and ``grpcs://`` for the gateway's."""

    scheme: str
    host: str
    port: int
    path: str = ""
    """What comes before ``/v1``."""
    tls: TlsFiles | None = None
    """Files of ``https`` and ``grpcs``; None: the authorities that the system, or gRPC, brings along."""
    api_key: str = field(default="", repr=False)

    @classmethod
    def parse(cls, url: str, *, tls: TlsFiles | None = None, api_key: str = "") -> Self:
        """Read a URL, with or without the ``/v1`` at its end. Raises ``ConfigError`` for what is none."""
        try:
            parts = urlsplit(url)
            port = parts.port or _DEFAULT_PORTS[parts.scheme]
        except (ValueError, KeyError):
            raise ConfigError(_NO_ENDPOINT.format(url=url)) from None
        if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or not parts.netloc.isascii():
            raise ConfigError(_NO_ENDPOINT.format(url=url))
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError("the URL of an endpoint has no user, query or fragment; a key is given with --api-key")
        path = parts.path.rstrip("/").removesuffix("/v1")
        if any(character <= " " or character > "~" for character in path):
            raise ConfigError(f"the path {path!r} has characters that no URL has")
        if path and parts.scheme in {"grpc", "grpcs"}:
            raise ConfigError(f"a gRPC endpoint has no path: {url!r}")
        if tls is not None and parts.scheme in {"http", "grpc"}:
            raise ConfigError(f"{parts.scheme}:// is without TLS: write {parts.scheme}s://, or leave out the TLS files")
        authorization_metadata(api_key)
        return cls(parts.scheme, parts.hostname, port, path, tls, api_key)

    @property
    def is_grpc(self) -> bool:
        """Whether it is the gateway's own API."""
        return self.scheme in {"grpc", "grpcs"}

    @property
    def address(self) -> str:
        """``host:port``, IPv6 hosts in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL in full."""
        return f"{self.scheme}://{self.address}{self.path}"

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return what an ``https`` connection is checked with. Raises ``ConfigError`` for files that cannot work."""
        if self.scheme != "https":
            return None
        context = ssl.create_default_context()
        if self.tls is not None:
            loaded = self.tls.load()
            if loaded.authorities is not None:
                context = ssl.create_default_context(cadata=loaded.authorities.decode("ascii"))
            if self.tls.certificate:
                context.load_cert_chain(self.tls.certificate, self.tls.private_key, lambda: "")
        return context


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of an endpoint, as far as it tells."""

    name: str
    vocab_size: int | None = None
    max_model_len: int | None = None
    """Longest sequence, prompt and output, in tokens."""


class LoadClient(Protocol):
    """One way to an endpoint."""

    async def models(self) -> Sequence[ServedModel]:
        """Return what is served; empty where the endpoint does not tell.

        Raises:
            OrcaError: the endpoint is not there or refuses.
        """
        ...

    async def send(self, request: TraceRequest, reception: Reception) -> None:
        """Send a request and read its answer into ``reception``, to the end. Being cancelled cancels the request.

        Raises:
            OrcaError: it was refused or broke off; what has come stays in ``reception``.
        """
        ...
