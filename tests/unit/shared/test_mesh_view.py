from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.codec.mesh_view import (
    engine_snapshot_from_pb,
    engine_snapshot_to_pb,
    mesh_snapshot_from_pb,
    mesh_snapshot_to_pb,
)
from shared.errors import InvalidRequestError, ProtocolError
from shared.ids import StepId
from shared.mesh_view import (
    DEFAULT_INTERVAL_S,
    MAX_INTERVAL_S,
    MIN_INTERVAL_S,
    EngineSnapshot,
    MeshSnapshot,
    StageTimeline,
    check_interval,
)
from shared.messages import EngineStatus, StepTiming, WorkerStatus
from shared.pb import common_pb2, gateway_pb2

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
rates = st.none() | st.floats(0, allow_nan=False, allow_infinity=False)
steps = st.builds(StepTiming, u64.map(StepId), u64, u64, u64, u32, u32, u32)
stages = st.builds(StageTimeline, u32, st.lists(steps, max_size=3).map(tuple))
STATUS = EngineStatus(
    ready=True, reason="", epoch=3, info=None, workers=(WorkerStatus(0, 0, "h:1", "ready"),), num_running=2
)
snapshots = st.builds(
    EngineSnapshot, st.just(STATUS), u64, st.lists(stages, max_size=3).map(tuple), rates, rates, rates
)


@given(snapshots)
def test_engine_snapshots_over_the_wire(snapshot: EngineSnapshot) -> None:
    message = common_pb2.EngineSnapshot.FromString(engine_snapshot_to_pb(snapshot).SerializeToString())
    assert engine_snapshot_from_pb(message) == snapshot


@given(st.builds(MeshSnapshot, snapshots, st.text(st.characters(codec="utf-8"), max_size=9), u32))
def test_mesh_snapshots_over_the_wire(snapshot: MeshSnapshot) -> None:
    message = gateway_pb2.MeshSnapshot.FromString(mesh_snapshot_to_pb(snapshot).SerializeToString())
    assert mesh_snapshot_from_pb(message) == snapshot


def test_columns_that_disagree_are_refused() -> None:
    message = common_pb2.EngineSnapshot(stages=[common_pb2.StageTimeline(step_ids=[1, 2], received_ns=[3])])
    with pytest.raises(ProtocolError, match="unequal length"):
        engine_snapshot_from_pb(message)


def test_intervals() -> None:
    for interval_s in (MIN_INTERVAL_S, DEFAULT_INTERVAL_S, MAX_INTERVAL_S):
        check_interval(interval_s)
    for interval_s in (0, 0.2499, 10.1, -1, math.nan, math.inf):
        with pytest.raises(InvalidRequestError, match="must be between"):
            check_interval(interval_s)
