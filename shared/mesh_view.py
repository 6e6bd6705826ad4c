"""What somebody who watches the mesh sees: `EngineSnapshot` of a scheduler, `MeshSnapshot` of a gateway.

Snapshots tell what has happened since the one before, so their size follows the engine's pace and not the length of the
watch. How they are collected is the services' matter, how they are shown that of the page and of ``orca top``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.errors import InvalidRequestError

if TYPE_CHECKING:
    from shared.messages import EngineStatus, StepTiming

__all__ = [
    "DEFAULT_INTERVAL_S",
    "MAX_INTERVAL_S",
    "MAX_STEPS",
    "MIN_INTERVAL_S",
    "EngineSnapshot",
    "MeshSnapshot",
    "StageTimeline",
    "check_interval",
]

MIN_INTERVAL_S = 0.25
MAX_INTERVAL_S = 10.0
DEFAULT_INTERVAL_S = 1.0

MAX_STEPS = 2048
"""Iterations of one stage in a snapshot at most; older ones are left out."""


@dataclass(frozen=True, slots=True)
class StageTimeline:
    """Iterations as they passed through the leader of a stage, oldest first, by the scheduler's clock.

    On one host all processes have the same clock. A stage on another host is translated, within half a round trip.
    """

    stage: int
    steps: tuple[StepTiming, ...]


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """What the engine is doing, and what it has done since the snapshot before."""

    status: EngineStatus
    taken_ns: int
    """By the scheduler's monotonic clock; 0 where no scheduler has answered."""
    stages: tuple[StageTimeline, ...] = ()
    """Iterations that have ended since the snapshot before; in the first one, the latest ones."""
    output_tokens_per_s: float | None = None
    """Since the snapshot before; None in the first one, and so are the two below."""
    prefill_tokens_per_s: float | None = None
    """Tokens of prompts that were computed; those that the prefix cache had are not."""
    steps_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class MeshSnapshot:
    """What the mesh does, as one of its gateways sees it."""

    engine: EngineSnapshot
    gateway_id: str
    num_gateway_requests: int
    """Requests that this gateway is serving."""


def check_interval(interval_s: float) -> None:
    """Raise ``InvalidRequestError`` for an interval that no watcher may have, seconds."""
    if not (math.isfinite(interval_s) and MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S):
        raise InvalidRequestError(
            f"the interval is {interval_s:g} s; it must be between {MIN_INTERVAL_S:g} and {MAX_INTERVAL_S:g}"
        )
