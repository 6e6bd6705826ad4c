"""Snapshots of engine and mesh, from scheduler to gateway to whoever watches."""

from __future__ import annotations

from shared.codec.columns import check_columns
from shared.codec.engine import engine_status_from_pb, engine_status_to_pb
from shared.ids import StepId
from shared.mesh_view import EngineSnapshot, MeshSnapshot, StageTimeline
from shared.messages import StepTiming
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
    steps = timeline.steps
    return common_pb2.StageTimeline(
        stage=timeline.stage,
        step_ids=[step.step_id for step in steps],
        received_ns=[step.received_ns for step in steps],
        started_ns=[step.started_ns for step in steps],
        ended_ns=[step.ended_ns for step in steps],
        num_sequences=[step.num_sequences for step in steps],
        num_tokens=[step.num_tokens for step in steps],
        num_decode_tokens=[step.num_decode_tokens for step in steps],
    )


def _stage_from_pb(message: common_pb2.StageTimeline) -> StageTimeline:
    columns = (
        message.step_ids,
        message.received_ns,
        message.started_ns,
        message.ended_ns,
        message.num_sequences,
        message.num_tokens,
        message.num_decode_tokens,
    )
    names = ("step_ids", "received_ns", "started_ns", "ended_ns", "num_sequences", "num_tokens", "num_decode_tokens")
    check_columns("timeline", *((name, len(column)) for name, column in zip(names, columns, strict=True)))
    steps = tuple(StepTiming(StepId(step_id), *rest) for step_id, *rest in zip(*columns, strict=True))
    return StageTimeline(message.stage, steps)
