"""``orca health``: the probe of containers and scripts."""

import asyncio
from typing import Annotated

import typer

from services.cli.calls import DEFAULT_ADDRESS
from shared.config import check_address

__all__ = ["health"]


def health(
    address: Annotated[
        str, typer.Option("--address", "-a", envvar="ORCA_ADDRESS", metavar="HOST:PORT", help="Address of any service.")
    ] = DEFAULT_ADDRESS,
    timeout: Annotated[float, typer.Option("--timeout", min=0, metavar="SECONDS", help="Time to wait.")] = 5.0,
) -> None:
    """Ask any service whether it is ready: exit code 0 where it is, 1 where it is not."""
    from services.mesh.health import check_serving

    check_address("address", address)
    asyncio.run(check_serving(address, timeout_s=timeout))
    typer.echo("SERVING")
