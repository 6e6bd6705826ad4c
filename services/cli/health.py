"""``orca health``: the probe of containers and scripts."""

import asyncio
from typing import Annotated

import typer

from services.cli.connection import (
    DEFAULT_ADDRESS,
    ClientCertOption,
    ClientKeyOption,
    TlsCaOption,
    TlsOption,
    client_tls,
)
from shared.config import check_address

__all__ = ["health"]


def health(
    address: Annotated[
        str, typer.Option("--address", "-a", envvar="ORCA_ADDRESS", metavar="HOST:PORT", help="Address of any service.")
    ] = DEFAULT_ADDRESS,
    timeout: Annotated[float, typer.Option("--timeout", min=0, metavar="SECONDS", help="Time to wait.")] = 5.0,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = "",
    client_cert: ClientCertOption = "",
    client_key: ClientKeyOption = "",
) -> None:
    """Ask any service whether it is ready: exit code 0 where it is, 1 where it is not.

    It takes no API key. A service with --mesh-tls-… wants a certificate of the mesh.
    """
    from services.mesh.health import check_serving
    from shared.tls import load_tls

    check_address("address", address)
    credentials = load_tls(client_tls(tls, tls_ca, client_cert, client_key))
    asyncio.run(check_serving(address, tls=credentials, timeout_s=timeout))
    typer.echo("SERVING")
