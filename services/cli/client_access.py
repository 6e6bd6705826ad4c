"""What a client of a gateway must bring: in words, and as options of ``orca`` and of curl."""

from dataclasses import dataclass

__all__ = ["ClientAccess"]

_AUTHORITY, _CERTIFICATE, _KEY = "ca.pem", "client.pem", "client-key.pem"
"""Stand for files of the client, which the gateway does not know."""


@dataclass(frozen=True, slots=True)
class ClientAccess:
    """What is asked of clients; by default nothing."""

    needs_key: bool = False
    needs_tls: bool = False
    needs_certificate: bool = False
    """A certificate of the client's own; only with TLS."""

    @property
    def words(self) -> str:
        """For people; empty where nothing is needed."""
        needs = ["an API key (ORCA_API_KEY or --api-key)"] if self.needs_key else []
        if self.needs_tls:
            needs.append("TLS (--tls, --tls-ca)")
        if self.needs_certificate:
            needs.append("a certificate (--client-cert, --client-key)")
        return ", ".join(needs)

    @property
    def exports(self) -> str:
        """What to type in a shell before anything else; empty where it is nothing."""
        return "export ORCA_API_KEY=…" if self.needs_key else ""

    @property
    def orca_options(self) -> str:
        """Options of an ``orca`` command, each after a space."""
        authority = f" --tls-ca {_AUTHORITY}" if self.needs_tls else ""
        own = f" --client-cert {_CERTIFICATE} --client-key {_KEY}" if self.needs_certificate else ""
        return authority + own

    @property
    def curl_options(self) -> str:
        """The same for curl."""
        authority = f" --cacert {_AUTHORITY}" if self.needs_tls else ""
        own = f" --cert {_CERTIFICATE} --key {_KEY}" if self.needs_certificate else ""
        key = ' -H "Authorization: Bearer $ORCA_API_KEY"' if self.needs_key else ""
        return authority + own + key
