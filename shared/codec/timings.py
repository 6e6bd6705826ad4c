"""When steps passed through a rank, as columns: of more than one seam."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.codec.columns import check_columns
from shared.ids import StepId
from shared.messages import StepTiming

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.pb import common_pb2, worker_pb2

    _Columns = common_pb2.StageTimeline | worker_pb2.GetTimelineResponse

__all__ = ["put_timings", "timings_of"]

_FIELD_OF_COLUMN = {
    "step_ids": "step_id",
    "received_ns": "received_ns",
    "started_ns": "started_ns",
    "ended_ns": "ended_ns",
    "num_sequences": "num_sequences",
    "num_tokens": "num_tokens",
    "num_decode_tokens": "num_decode_tokens",
}
"""In the order of ``StepTiming``'s fields."""


def put_timings(message: _Columns, timings: Sequence[StepTiming]) -> None:
    """Append timings to a message's columns."""
    for column, field in _FIELD_OF_COLUMN.items():
        getattr(message, column).extend([getattr(timing, field) for timing in timings])


def timings_of(message: _Columns) -> list[StepTiming]:
    """Return a message's timings; columns that disagree are refused."""
    columns = [getattr(message, column) for column in _FIELD_OF_COLUMN]
    check_columns("timeline", *zip(_FIELD_OF_COLUMN, map(len, columns), strict=True))
    return [StepTiming(StepId(step_id), *rest) for step_id, *rest in zip(*columns, strict=True)]
