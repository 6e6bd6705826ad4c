"""Options of who gets in: API keys, the queue before the engine, TLS towards clients and between the services.

Defaults are those of ``shared.config``.
"""

from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.sizes import parse_size

if TYPE_CHECKING:
    from shared.tls import TlsFiles

__all__ = [
    "ApiKeysOption",
    "MaxQueuedBytesOption",
    "MaxQueuedOption",
    "MeshTlsCaOption",
    "MeshTlsCertOption",
    "MeshTlsKeyOption",
    "TlsCertOption",
    "TlsClientCaOption",
    "TlsKeyOption",
    "mesh_tls",
    "public_tls",
]

_ACCESS = "Access"
_FILE = "FILE"

ApiKeysOption = Annotated[
    str,
    typer.Option(
        "--api-keys",
        envvar="ORCA_API_KEYS",
        metavar=_FILE,
        show_default="everybody may call",
        rich_help_panel=_ACCESS,
        help="File of API keys, one a line: NAME SECRET \\[weight=N] \\[max_requests=N]. SECRET is the key itself "
        "or sha256:<hex>. It is read again when it changes.",
    ),
]
MaxQueuedOption = Annotated[
    int,
    typer.Option(
        "--max-queued",
        envvar="ORCA_MAX_QUEUED",
        rich_help_panel=_ACCESS,
        help="Requests that wait at the gateway, in fair shares between API keys; one more is refused.",
    ),
]
MaxQueuedBytesOption = Annotated[
    int,
    typer.Option(
        "--max-queued-bytes",
        envvar="ORCA_MAX_QUEUED_BYTES",
        parser=parse_size,
        metavar="SIZE",
        show_default="256MiB",
        rich_help_panel=_ACCESS,
        help="Memory for prompts that wait at the gateway.",
    ),
]
TlsCertOption = Annotated[
    str,
    typer.Option(
        "--tls-cert",
        envvar="ORCA_TLS_CERT",
        metavar=_FILE,
        show_default="no TLS",
        rich_help_panel=_ACCESS,
        help="Certificate, in PEM, that the gateway shows its clients; the authorities between it and the root follow.",
    ),
]
TlsKeyOption = Annotated[
    str,
    typer.Option(
        "--tls-key",
        envvar="ORCA_TLS_KEY",
        metavar=_FILE,
        show_default=False,
        rich_help_panel=_ACCESS,
        help="Private key of --tls-cert, in PEM without a password.",
    ),
]
TlsClientCaOption = Annotated[
    str,
    typer.Option(
        "--tls-client-ca",
        envvar="ORCA_TLS_CLIENT_CA",
        metavar=_FILE,
        show_default="clients need no certificate",
        rich_help_panel=_ACCESS,
        help="Only clients with a certificate of these authorities get in.",
    ),
]
MeshTlsCertOption = Annotated[
    str,
    typer.Option(
        "--mesh-tls-cert",
        envvar="ORCA_MESH_TLS_CERT",
        metavar=_FILE,
        show_default="no TLS",
        rich_help_panel=_ACCESS,
        help="Certificate, in PEM, that this service shows the others of the mesh, as server and as client; it must be "
        "valid for the host under which they reach it. Activations are not encrypted.",
    ),
]
MeshTlsKeyOption = Annotated[
    str,
    typer.Option(
        "--mesh-tls-key",
        envvar="ORCA_MESH_TLS_KEY",
        metavar=_FILE,
        show_default=False,
        rich_help_panel=_ACCESS,
        help="Private key of --mesh-tls-cert, in PEM without a password.",
    ),
]
MeshTlsCaOption = Annotated[
    str,
    typer.Option(
        "--mesh-tls-ca",
        envvar="ORCA_MESH_TLS_CA",
        metavar=_FILE,
        show_default=False,
        rich_help_panel=_ACCESS,
        help="Authority of the mesh alone: whoever has a certificate of it is taken for a service.",
    ),
]


def public_tls(certificate: str, private_key: str, authorities: str) -> "TlsFiles | None":
    """Files of ``--tls-…``; None where none is given. Raises ``ConfigError``."""
    from shared.tls import TlsFiles, TlsRole

    return TlsFiles.given(TlsRole.PUBLIC, certificate, private_key, authorities)


def mesh_tls(certificate: str, private_key: str, authorities: str) -> "TlsFiles | None":
    """Files of ``--mesh-tls-…``; None where none is given. Raises ``ConfigError``."""
    from shared.tls import TlsFiles, TlsRole

    return TlsFiles.given(TlsRole.MESH, certificate, private_key, authorities)
