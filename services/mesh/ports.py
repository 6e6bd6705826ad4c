"""Whether a port can be listened at, found out before anything is started."""

from __future__ import annotations

import errno
import os
import socket

from services.mesh.exits import MeshError

__all__ = ["check_port", "dial_address", "dial_url"]

_ANY_HOST = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}  # noqa: S104 - compared, not bound


def check_port(host: str, port: int, *, option: str) -> None:
    """Raise ``MeshError`` where nobody could listen at ``host:port``; ``option`` is what the user would change."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise MeshError(
            f"cannot listen at {host}: {error.strerror or error}; choose another address with --host"
        ) from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        # As gRPC does: connections of an earlier run that linger in TIME_WAIT are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen()
        except OSError as error:
            raise MeshError(_port_problem(error, host, port, option)) from error


def dial_address(address: str) -> str:
    """Turn the address that a server listens at into one that a client of this host can call."""
    host, _, port = address.rpartition(":")
    return f"{_ANY_HOST.get(host, host)}:{port}"


def dial_url(url: str) -> str:
    """Turn the base URL that a server has into one that a client of this host can use; empty stays empty."""
    scheme, separator, address = url.partition("://")
    return scheme + separator + (dial_address(address) if address else "")


def _port_problem(error: OSError, host: str, port: int, option: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is in use: stop the program that listens there, or choose another port "
            f"with {option} (0 takes any free one)"
        )
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than this user has: choose one from 1024 up with {option}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this host: choose another with --host (127.0.0.1 is this host only)"
    return f"cannot listen at {host}:{port}: {os.strerror(error.errno or 0)}; choose another with --host and {option}"
