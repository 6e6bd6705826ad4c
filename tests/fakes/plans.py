"""Control messages on both sides of the wire: a scheduler's lists, a worker's arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.codec.step_columns import StepColumns, step_columns_from_pb
from shared.codec.steps import step_plan_to_pb
from shared.ids import BlockId, Row
from shared.messages import StepPlan

if TYPE_CHECKING:
    from shared.codec.step_columns import Appended

__all__ = ["as_plan", "received"]


def received(plan: StepPlan) -> StepColumns:
    """Return what a worker makes of a plan."""
    return step_columns_from_pb(step_plan_to_pb(plan))


def as_plan(columns: StepColumns) -> StepPlan:
    """Return the plan that a worker has received."""
    size = columns.rows.size
    num_appended_tokens, appended_token_ids = _lists(columns.appended_tokens, size)
    num_new_blocks, new_block_ids = _lists(columns.new_blocks, size)
    return StepPlan(
        epoch=columns.epoch,
        step_id=columns.step_id,
        rows=[Row(row) for row in columns.rows.tolist()],
        num_computed_tokens=columns.num_computed_tokens.tolist(),
        num_tokens=columns.num_tokens.tolist(),
        samples=columns.samples.tolist(),
        num_appended_tokens=num_appended_tokens,
        appended_token_ids=appended_token_ids,
        num_new_blocks=num_new_blocks,
        new_block_ids=[BlockId(block) for block in new_block_ids],
        new_sequences=columns.new_sequences,
        released_rows=columns.released_rows,
    )


def _lists(appended: Appended | None, size: int) -> tuple[list[int], list[int]]:
    return ([0] * size, []) if appended is None else (appended.counts.tolist(), appended.values.tolist())
