"""Bounds on latency, and which requests keep them (goodput: requests per second that do).

Written as vLLM's ``--goodput``: ``ttft:500`` is a first token within 500 ms.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from shared.errors import ConfigError

if TYPE_CHECKING:
    from bench.load.records import RequestRecord

__all__ = ["LatencyBound", "LatencyMetric"]


class LatencyMetric(enum.StrEnum):
    """A latency of one request."""

    TTFT = "ttft"
    TPOT = "tpot"
    E2E = "e2e"
    NORMALISED = "normalised"


_ALIASES = {"e2el": LatencyMetric.E2E, "normalized": LatencyMetric.NORMALISED}
"""As vLLM and others write them."""


@dataclass(frozen=True, slots=True)
class LatencyBound:
    """What a latency may be at most."""

    metric: LatencyMetric
    max_ms: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``METRIC:MILLISECONDS``. Raises ``ConfigError`` for anything else."""
        name, _, bound = text.partition(":")
        names = {metric.value: metric for metric in LatencyMetric} | _ALIASES
        try:
            max_ms = float(bound)
        except ValueError:
            max_ms = math.nan
        if name not in names or not 0 < max_ms < math.inf:
            known = ", ".join(metric.value for metric in LatencyMetric)
            raise ConfigError(f"{text!r} is not METRIC:MILLISECONDS, for example ttft:500; metrics are {known}")
        return cls(names[name], max_ms)

    def is_kept(self, record: RequestRecord) -> bool:
        """Whether a request that ended well was quick enough; one token has no time per token after the first."""
        match self.metric:
            case LatencyMetric.TTFT:
                value: float | None = record.ttft_ms
            case LatencyMetric.TPOT:
                value = record.tpot_ms
            case LatencyMetric.E2E:
                value = record.e2e_ms
            case LatencyMetric.NORMALISED:
                value = record.normalised_ms
        return value is None or value <= self.max_ms

    def __str__(self) -> str:
        return f"{self.metric.value}:{self.max_ms:g}"
