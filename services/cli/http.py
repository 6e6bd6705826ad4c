"""What of ``--http-…`` and its kin a gateway's configuration is."""

from shared.config import HttpConfig, ListenConfig
from shared.errors import ConfigError

__all__ = ["http"]


def http(host: str, port: str, max_body_bytes: int, cors_origins: str, allowed_hosts: str) -> HttpConfig | None:
    """Build the configuration; None where it is off. Raises ``ConfigError``."""
    if port == "off":
        return None
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--http-port must be a port from 0 to 65535, or off, not {port!r}")
    return HttpConfig(ListenConfig(host, int(port)), max_body_bytes, _listed(cors_origins), _listed(allowed_hosts))


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()
