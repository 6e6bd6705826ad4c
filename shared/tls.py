"""TLS of one end of a connection: which PEM files, under which options, and whether they go together.

Off where no file is given. It covers the control plane, which is gRPC; activations and the rendezvous of the data plane
stay in the clear.
"""

from __future__ import annotations

import enum
import ipaddress
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from shared.errors import ConfigError

__all__ = ["TlsCredentials", "TlsFiles", "TlsRole", "is_loopback", "load_tls"]

_MAX_FILE_BYTES = 1 << 20


class TlsRole(enum.Enum):
    """Whose files they are: the options that name certificate, private key and authorities."""

    PUBLIC = ("--tls-cert", "--tls-key", "--tls-client-ca")
    """What the gateway shows its clients; with authorities, clients must show a certificate, too."""
    MESH = ("--mesh-tls-cert", "--mesh-tls-key", "--mesh-tls-ca")
    """What services show each other: always both ends."""
    CLIENT = ("--client-cert", "--client-key", "--tls-ca")
    """What a client of the gateway has; without authorities, those that gRPC brings along."""


@dataclass(frozen=True, slots=True)
class TlsCredentials:
    """What one end shows and whom it trusts, in PEM."""

    certificate: bytes | None = None
    """Own certificate, the authorities between it and the root after it."""
    private_key: bytes | None = field(default=None, repr=False)
    authorities: bytes | None = None
    """Who may have signed the other end's certificate."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files; empty where there is none."""

    certificate: str = ""
    private_key: str = ""
    authorities: str = ""
    role: TlsRole = TlsRole.CLIENT

    def __post_init__(self) -> None:
        """Check that nothing is missing for the role."""
        cert, key, authorities = self.role.value
        if bool(self.certificate) != bool(self.private_key):
            raise ConfigError(f"{cert} and {key} go together: give both, or none")
        if self.role is TlsRole.PUBLIC and not self.certificate:
            raise ConfigError(f"{authorities} needs {cert} and {key}: without TLS no client shows a certificate")
        if self.role is TlsRole.MESH and not (self.certificate and self.authorities):
            raise ConfigError(f"{cert}, {key} and {authorities} go together: services check each other")

    @classmethod
    def given(cls, role: TlsRole, certificate: str, private_key: str, authorities: str) -> TlsFiles | None:
        """Return the files of the options as given; None where none is: no TLS."""
        if not (certificate or private_key or authorities):
            return None
        return cls(certificate, private_key, authorities, role)

    def load(self) -> TlsCredentials:
        """Read the files, and check that the key is the certificate's.

        Raises:
            ConfigError: a file cannot be read or is not what it should be; the message names the option.
        """
        cert_option, key_option, authorities_option = self.role.value
        certificate = _read(cert_option, self.certificate)
        private_key = _read(key_option, self.private_key)
        authorities = _read(authorities_option, self.authorities)
        for option, path, pem in (
            (cert_option, self.certificate, certificate),
            (authorities_option, self.authorities, authorities),
        ):
            if pem is not None:
                _check_certificates(option, path, pem)
        if private_key is not None:
            self._check_pair()
        return TlsCredentials(certificate, private_key, authorities)

    def _check_pair(self) -> None:
        cert_option, key_option, _ = self.role.value
        try:
            # An empty password: one that is wanted is an error, not a question on the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.private_key, lambda: "")
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ConfigError(
                    f"{key_option} {self.private_key} is not the key of {cert_option} {self.certificate}"
                ) from error
            raise ConfigError(
                f"{key_option} {self.private_key} is not a private key in PEM without a password"
            ) from error


def load_tls(files: TlsFiles | None) -> TlsCredentials | None:
    """Load what is configured, if anything is."""
    return None if files is None else files.load()


def is_loopback(host: str) -> bool:
    """Whether only this host reaches what listens at ``host``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _read(option: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{option} {path} has more than {_MAX_FILE_BYTES} bytes: it is no PEM file")
    return data


def _check_certificates(option: str, path: str, pem: bytes) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{option} {path} holds no certificate in PEM") from error
