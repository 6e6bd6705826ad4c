"""How a command reaches its gateway: address, TLS and API key, written once for every command that calls one."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.option_group import taking
from services.cli.options import AddressOption

if TYPE_CHECKING:
    from shared.client import GatewayClient
    from shared.sync_client import SyncGatewayClient
    from shared.tls import TlsFiles

__all__ = [
    "DEFAULT_ADDRESS",
    "ApiKeyOption",
    "ClientCertOption",
    "ClientKeyOption",
    "Connection",
    "TlsCaOption",
    "TlsOption",
    "client_tls",
    "takes_connection",
]

DEFAULT_ADDRESS = "127.0.0.1:50051"

_CONNECTION = "Connection"

TlsOption = Annotated[
    bool,
    typer.Option(
        "--tls/--no-tls",
        envvar="ORCA_TLS",
        show_default=False,
        rich_help_panel=_CONNECTION,
        help="Speak TLS; without --tls-ca with whom a public authority vouches for.",
    ),
]
TlsCaOption = Annotated[
    str,
    typer.Option(
        "--tls-ca",
        envvar="ORCA_TLS_CA",
        metavar="FILE",
        show_default=False,
        rich_help_panel=_CONNECTION,
        help="Speak TLS with whom these authorities, in PEM, vouch for.",
    ),
]
ClientCertOption = Annotated[
    str,
    typer.Option(
        "--client-cert",
        envvar="ORCA_CLIENT_CERT",
        metavar="FILE",
        show_default=False,
        rich_help_panel=_CONNECTION,
        help="Certificate of your own, in PEM, where one is asked for.",
    ),
]
ClientKeyOption = Annotated[
    str,
    typer.Option(
        "--client-key",
        envvar="ORCA_CLIENT_KEY",
        metavar="FILE",
        show_default=False,
        rich_help_panel=_CONNECTION,
        help="Private key of --client-cert, in PEM without a password.",
    ),
]
ApiKeyOption = Annotated[
    str,
    typer.Option(
        "--api-key",
        envvar="ORCA_API_KEY",
        metavar="KEY",
        show_default=False,
        rich_help_panel=_CONNECTION,
        help="API key, where one is asked for; others on this host see it, unless it is given in the variable.",
    ),
]


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the gateway is, and what it is shown."""

    address: str = DEFAULT_ADDRESS
    tls: "TlsFiles | None" = None
    api_key: str = ""

    def open(self) -> "SyncGatewayClient":
        """Return a client; it connects with its first call. Raises ``ConfigError`` for files that cannot work."""
        from shared.sync_client import SyncGatewayClient
        from shared.tls import load_tls

        return SyncGatewayClient(self.address, api_key=self.api_key or None, tls=load_tls(self.tls))

    def open_async(self) -> "GatewayClient":
        """Return a client for asyncio; otherwise as ``open``."""
        from shared.client import GatewayClient
        from shared.tls import load_tls

        return GatewayClient(self.address, api_key=self.api_key or None, tls=load_tls(self.tls))


def client_tls(wanted: bool, authorities: str, certificate: str, private_key: str) -> "TlsFiles | None":
    """Files of ``--tls-ca`` and ``--client-…``; None without TLS. Raises ``ConfigError``."""
    from shared.tls import TlsFiles, TlsRole

    if wanted:
        return TlsFiles(certificate, private_key, authorities, TlsRole.CLIENT)
    return TlsFiles.given(TlsRole.CLIENT, certificate, private_key, authorities)


def _connection(
    *,
    address: AddressOption = DEFAULT_ADDRESS,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = "",
    client_cert: ClientCertOption = "",
    client_key: ClientKeyOption = "",
    api_key: ApiKeyOption = "",
) -> Connection:
    return Connection(address, client_tls(tls, tls_ca, client_cert, client_key), api_key)


def takes_connection(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all options of a connection, in place of its parameter ``connection``."""
    return taking(command, "connection", [*inspect.signature(_connection).parameters.values()], _connection)
