"""A control message as a worker takes it: straight from protobuf into NumPy columns.

A scheduler builds ``shared.messages.StepPlan`` of the lists that it has; a worker computes with arrays, and no object
is made here for a sequence that it knows already. ``np.fromiter`` over a repeated field is what is quickest up to some
64 sequences, and with cold caches beyond that; the fields' own ``__array__`` takes 2 µs each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from shared.codec.columns import check_columns
from shared.codec.engine import sampling_from_pb
from shared.ids import Epoch, RequestId, Row, StepId
from shared.messages import NewSequence, token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.pb import worker_pb2

__all__ = ["Appended", "StepColumns", "step_columns_from_pb"]

_Integers: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
_Booleans: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]


class Appended(NamedTuple):
    """What an iteration brings to its B sequences: at least one value, side by side in batch order."""

    counts: _Integers
    """[B] how many of the values are each sequence's."""
    values: _Integers
    """[sum of counts]"""


@dataclass(frozen=True, slots=True, eq=False)
class StepColumns:
    """A ``StepPlan`` of B sequences, which says what each column means. Nothing is negative; nobody writes to it."""

    epoch: Epoch
    step_id: StepId
    rows: _Integers
    """[B]"""
    num_computed_tokens: _Integers
    """[B]"""
    num_tokens: _Integers
    """[B]"""
    samples: _Booleans
    """[B]"""
    appended_tokens: Appended | None
    """None where no sequence gets any."""
    new_blocks: Appended | None
    """None where no sequence gets any."""
    new_sequences: list[NewSequence]
    released_rows: list[Row]


def step_columns_from_pb(message: worker_pb2.StepPlan) -> StepColumns:
    """Translate; columns that disagree are refused with ``ProtocolError``."""
    size = len(message.rows)
    lengths = (
        ("rows", size),
        ("num_computed_tokens", len(message.num_computed_tokens)),
        ("num_tokens", len(message.num_tokens)),
        ("samples", len(message.samples)),
        ("num_appended_tokens", len(message.num_appended_tokens)),
        ("num_new_blocks", len(message.num_new_blocks)),
    )
    step_id = message.step_id
    check_columns(f"step {step_id}", *lengths)
    return StepColumns(
        epoch=Epoch(message.epoch),
        step_id=StepId(step_id),
        rows=np.fromiter(message.rows, np.int64, size),
        num_computed_tokens=np.fromiter(message.num_computed_tokens, np.int64, size),
        num_tokens=np.fromiter(message.num_tokens, np.int64, size),
        samples=np.fromiter(message.samples, np.bool_, size),
        appended_tokens=_appended(
            step_id,
            ("num_appended_tokens", message.num_appended_tokens),
            ("appended_token_ids", message.appended_token_ids),
        ),
        new_blocks=_appended(
            step_id, ("num_new_blocks", message.num_new_blocks), ("new_block_ids", message.new_block_ids)
        ),
        new_sequences=[_new_sequence_from_pb(sequence) for sequence in message.new_sequences],
        released_rows=[Row(row) for row in message.released_rows],
    )


def _appended(step_id: int, counts: tuple[str, Sequence[int]], values: tuple[str, Sequence[int]]) -> Appended | None:
    total, num_values = sum(counts[1]), len(values[1])
    if total != num_values:
        check_columns(f"step {step_id}", (f"sum of {counts[0]}", total), (values[0], num_values))
    if not total:
        return None
    return Appended(np.fromiter(counts[1], np.int64, len(counts[1])), np.fromiter(values[1], np.int64, num_values))


def _new_sequence_from_pb(message: worker_pb2.NewSequence) -> NewSequence:
    return NewSequence(
        row=Row(message.row),
        request_id=RequestId(message.request_id),
        token_ids=token_ids(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=sampling_from_pb(message.sampling),
        stop_token_ids=frozenset(message.stop_token_ids),
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        grammar=message.grammar,
        traceparent=message.traceparent,
    )
