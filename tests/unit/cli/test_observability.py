from __future__ import annotations

import pytest

from services.cli.observability import observability
from shared.config import ListenConfig, ObservabilityConfig
from shared.errors import ConfigError


def test_nothing_is_told_unless_asked() -> None:
    assert observability("127.0.0.1", "off", "") == ObservabilityConfig()


@pytest.mark.parametrize("port", [0, 9400, 65535])
def test_a_port_for_metrics_and_a_collector_for_traces(port: int) -> None:
    wanted = ObservabilityConfig(ListenConfig("0.0.0.0", port), "http://collector:4318")
    assert observability("0.0.0.0", str(port), "http://collector:4318") == wanted


@pytest.mark.parametrize("port", ["", "on", "-1", "65536", "9400.0"])
def test_what_is_no_port_is_refused(port: str) -> None:
    with pytest.raises(ConfigError, match="--metrics-port must be a port from 0 to 65535, or off"):
        observability("127.0.0.1", port, "")
