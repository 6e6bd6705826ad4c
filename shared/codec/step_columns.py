"""A control message as a worker takes it: straight from protobuf into NumPy columns.

A scheduler builds ``shared.messages.StepPlan`` of the lists that it has; a worker computes with arrays, and no object
is made here for a sequence that it knows already. ``np.fromiter`` over a repeated field is what is quickest up to some
64 sequences, and with cold caches beyond that; the fields' own ``__array__`` takes 2 µs each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from shared.codec.columns import check_columns
from shared.codec.engine import sampling_from_pb
from shared.ids import Epoch, RequestId, Row, StepId
from shared.messages import NewSequence, token_ids

if TYPE_CHECKING:
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


class StepColumns(NamedTuple):
    """A ``StepPlan`` of B sequences, which says what each column means. Nothing is negative; nobody writes to it."""

    epoch: Epoch
    step_id: StepId
    rows: _Integers
    """[B]"""
    num_computed_tokens: _Integers
    """[B]"""
    num_tokens: _Integers
    """[B]"""
    total_tokens: int
    """Sum of ``num_tokens``."""
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
    if not (
        size
        == len(message.num_computed_tokens)
        == len(message.num_tokens)
        == len(message.samples)
        == len(message.num_appended_tokens)
        == len(message.num_new_blocks)
    ):
        names = ("rows", "num_computed_tokens", "num_tokens", "samples", "num_appended_tokens", "num_new_blocks")
        check_columns(f"step {message.step_id}", *((name, len(getattr(message, name))) for name in names))
    return StepColumns(
        epoch=Epoch(message.epoch),
        step_id=StepId(message.step_id),
        rows=np.fromiter(message.rows, np.int64, size),
        num_computed_tokens=np.fromiter(message.num_computed_tokens, np.int64, size),
        num_tokens=np.fromiter(message.num_tokens, np.int64, size),
        total_tokens=sum(message.num_tokens),
        samples=np.fromiter(message.samples, np.bool_, size),
        appended_tokens=_appended(message, "num_appended_tokens", "appended_token_ids"),
        new_blocks=_appended(message, "num_new_blocks", "new_block_ids"),
        new_sequences=[_new_sequence_from_pb(sequence) for sequence in message.new_sequences],
        released_rows=[Row(row) for row in message.released_rows],
    )


def _appended(message: worker_pb2.StepPlan, counts_name: str, values_name: str) -> Appended | None:
    counts, values = getattr(message, counts_name), getattr(message, values_name)
    total = sum(counts)
    if total != len(values):
        check_columns(f"step {message.step_id}", (f"sum of {counts_name}", total), (values_name, len(values)))
    if not total:
        return None
    return Appended(np.fromiter(counts, np.int64, len(counts)), np.fromiter(values, np.int64, total))


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
