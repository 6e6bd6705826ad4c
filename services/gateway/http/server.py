"""The HTTP server: uvicorn in the gateway's own event loop, at a socket of ours, signals and logs left alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from typing import TYPE_CHECKING

import uvicorn

from services.gateway.http.connection import ClientConnection
from shared.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp

    from shared.config import ListenConfig
    from shared.tls import TlsFiles

__all__ = ["HttpServer"]

_KEEP_ALIVE_S = 75
"""Longer than the pools of usual clients keep a connection: the server must not be the first to close it."""
_BACKLOG = 2048
_TCP_KEEPALIVE_S = 20
_TCP_GONE_S = 120
"""A client that takes nothing at all for so long is given up."""


class HttpServer:
    """Serves an application at one address."""

    def __init__(self, app: ASGIApp, listen: ListenConfig, tls: TlsFiles | None = None) -> None:
        """Listen; clients are answered once `serve` runs.

        Raises:
            ConfigError: the port is taken, or the address is not this host's.
        """
        self._scheme = "http" if tls is None else "https"
        self._server = _Server(
            uvicorn.Config(
                app,
                http=ClientConnection,
                ws="none",
                lifespan="off",
                log_config=None,
                # Failures are told by the application itself; uvicorn's own logger would write past ours.
                log_level=logging.CRITICAL,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                ssl_certfile=tls.certificate if tls else None,
                ssl_keyfile=tls.private_key if tls else None,
                ssl_ca_certs=(tls.authorities or None) if tls else None,
                ssl_cert_reqs=ssl.CERT_REQUIRED if tls and tls.authorities else ssl.CERT_NONE,
            )
        )
        self._socket = _listen(listen.host, listen.port)
        self._host = listen.host

    @property
    def address(self) -> str:
        """The base URL."""
        port: int = self._socket.getsockname()[1]
        host = self._host.strip("[]")
        return f"{self._scheme}://[{host}]:{port}" if ":" in host else f"{self._scheme}://{host}:{port}"

    async def serve(self) -> None:
        """Answer clients until ``stop``; cancelled, leave them alone at once."""
        state = self._server.server_state
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            for listener in getattr(self._server, "servers", []):
                listener.close()
            self._socket.close()
            for connection in list(state.connections):
                connection.transport.abort()
            if state.tasks:
                await asyncio.wait(state.tasks)

    def stop(self, grace_s: float) -> None:
        """Let ``serve`` end: take no more, let what runs end within ``grace_s``."""
        self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]  # it is waited with
        self._server.should_exit = True


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the service."""
        yield


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_KEEPIDLE"):
                # Connections inherit these.
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _TCP_KEEPALIVE_S)
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _TCP_KEEPALIVE_S // 4)
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_GONE_S * 1000)
            listener.bind(address)
            listener.listen(_BACKLOG)
            listener.setblocking(False)  # noqa: FBT003 - the standard library's
        except BaseException:
            listener.close()
            raise
    except OSError as failure:
        raise ConfigError(
            f"cannot listen at {host}:{port} for HTTP ({failure.strerror or failure}); stop the other program, or "
            "choose another address with --http-host or --http-port (0 takes any free port)"
        ) from failure
    return listener
