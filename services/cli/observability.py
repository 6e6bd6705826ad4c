"""What of ``--metrics-…`` and ``--otlp-endpoint`` a service's configuration is."""

from shared.config import ListenConfig, ObservabilityConfig
from shared.errors import ConfigError

__all__ = ["observability"]


def observability(metrics_host: str, metrics_port: str, otlp_endpoint: str) -> ObservabilityConfig:
    """Build the configuration. Raises ``ConfigError``."""
    if metrics_port == "off":
        return ObservabilityConfig(None, otlp_endpoint)
    if not metrics_port.isdecimal() or int(metrics_port) > 65535:
        raise ConfigError(f"--metrics-port must be a port from 0 to 65535, or off, not {metrics_port!r}")
    return ObservabilityConfig(ListenConfig(metrics_host, int(metrics_port)), otlp_endpoint)
