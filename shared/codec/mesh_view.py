"""Snapshots of engine and mesh, from scheduler to gateway to whoever watches."""

from __future__ import annotations

from shared.codec.engine import engine_status_from_pb, engine_status_to_pb
from shared.codec.timings import put_timings, timings_of
from shared.mesh_view import EngineSnapshot, MeshSnapshot, StageTimeline
from shared.pb import common_pb2, gateway_pb2

__all__ = [
    "engine_snapshot_from_pb",
    "engine_snapshot_to_pb",
    "mesh_snapshot_from_pb",
    "mesh_snapshot_to_pb",
]


def engine_snapshot_to_pb(snapshot: EngineSnapshot) -> common_pb2.EngineSnapshot:
    """Translate."""
    return common_pb2.EngineSnapshot(
        status=engine_status_to_pb(snapshot.status),
        taken_ns=snapshot.taken_ns,
        stages=[_stage_to_pb(stage) for stage in snapshot.stages],
        output_tokens_per_s=snapshot.output_tokens_per_s,
        prefill_tokens_per_s=snapshot.prefill_tokens_per_s,
        steps_per_s=snapshot.steps_per_s,
    )


def engine_snapshot_from_pb(message: common_pb2.EngineSnapshot) -> EngineSnapshot:
    """Translate; columns that disagree are refused."""
    return EngineSnapshot(
        status=engine_status_from_pb(message.status),
        taken_ns=message.taken_ns,
        stages=tuple(_stage_from_pb(stage) for stage in message.stages),
        output_tokens_per_s=message.output_tokens_per_s if message.HasField("output_tokens_per_s") else None,
        prefill_tokens_per_s=message.prefill_tokens_per_s if message.HasField("prefill_tokens_per_s") else None,
        steps_per_s=message.steps_per_s if message.HasField("steps_per_s") else None,
    )


def mesh_snapshot_to_pb(snapshot: MeshSnapshot) -> gateway_pb2.MeshSnapshot:
    """Translate."""
    return gateway_pb2.MeshSnapshot(
        engine=engine_snapshot_to_pb(snapshot.engine),
        gateway_id=snapshot.gateway_id,
        num_gateway_requests=snapshot.num_gateway_requests,
    )


def mesh_snapshot_from_pb(message: gateway_pb2.MeshSnapshot) -> MeshSnapshot:
    """Translate; columns that disagree are refused."""
    return MeshSnapshot(
        engine=engine_snapshot_from_pb(message.engine),
        gateway_id=message.gateway_id,
        num_gateway_requests=message.num_gateway_requests,
    )


def _stage_to_pb(timeline: StageTimeline) -> common_pb2.StageTimeline:
    message = common_pb2.StageTimeline(stage=timeline.stage)
    put_timings(message, timeline.steps)
    return message


def _stage_from_pb(message: common_pb2.StageTimeline) -> StageTimeline:
    return StageTimeline(message.stage, tuple(timings_of(message)))
