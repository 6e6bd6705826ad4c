from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from services.worker.inputs import flatten, forward_batch, sampling_columns
from services.worker.sequences import SequenceTable
from shared.messages import SamplingParams
from tests.fakes.fake_worker_peers import columns, sequence

if TYPE_CHECKING:
    from services.worker.sequences import Batch
    from shared.codec.step_columns import StepColumns

CPU = torch.device("cpu")


def test_prefill_chunk_and_decode_are_flattened_side_by_side() -> None:
    table = SequenceTable(max_model_len=64, vocab_size=100, num_blocks=32, block_size=4)
    table.apply(
        columns(
            0,
            (0, 0, 3),
            (5, 0, 6),
            new_sequences=[
                sequence(0, range(10, 19), SamplingParams(temperature=0.5, seed=7)),
                sequence(5, range(20, 26), SamplingParams(temperature=1.0, top_k=4, top_p=0.5, min_p=0.25, seed=9)),
            ],
            num_new_blocks=[3, 2],
            new_block_ids=[30, 8, 2, 5, 1],
        )
    )
    batch = applied(
        table,
        columns(
            1,
            (5, 6, 1),
            (0, 3, 4),
            samples=[True, False],
            num_appended_tokens=[1, 0],
            appended_token_ids=[77],
        ),
    )
    inputs = forward_batch(table, batch, flatten(batch), CPU)
    assert inputs.token_ids.tolist() == [77, 13, 14, 15, 16]
    assert inputs.positions.tolist() == [6, 3, 4, 5, 6]
    assert inputs.slot_mapping.tolist() == [1 * 4 + 2, 30 * 4 + 3, 8 * 4, 8 * 4 + 1, 8 * 4 + 2]
    assert inputs.query_start.tolist() == [0, 1, 5]
    assert inputs.context_lens.tolist() == [7, 7]
    assert inputs.block_tables.tolist() == [[5, 1], [30, 8]]
    assert inputs.sample_rows.tolist() == [0]
    chosen = sampling_columns(table, batch.rows[batch.samples], batch.context_lens[batch.samples])
    assert chosen.position.tolist() == [7]
    assert (chosen.temperature.tolist(), chosen.top_k.tolist()) == ([1.0], [4])
    assert (chosen.top_p.tolist(), chosen.min_p.tolist(), chosen.seed.tolist()) == ([0.5], [0.25], [9])


def test_sampled_position_is_the_same_after_recomputation() -> None:
    """Decode of the 7th token, and a prefill of all tokens so far in another row, sample for the same position."""
    table = SequenceTable(max_model_len=64, vocab_size=100, num_blocks=32, block_size=16)
    new = [sequence(0, range(6))]
    table.apply(columns(0, (0, 0, 6), new_sequences=new, num_new_blocks=[1], new_block_ids=[0]))
    decode = applied(table, columns(1, (0, 6, 1), num_appended_tokens=[1], appended_token_ids=[6]))
    new = [sequence(1, range(7))]
    again = applied(table, columns(2, (1, 0, 7), new_sequences=new, num_new_blocks=[1], new_block_ids=[1]))
    assert decode.context_lens == again.context_lens == [7]


def test_block_tables_are_padded_with_zeros() -> None:
    table = SequenceTable(max_model_len=64, vocab_size=100, num_blocks=32, block_size=4)
    batch = applied(
        table,
        columns(
            0,
            (0, 0, 1),
            (1, 0, 9),
            new_sequences=[sequence(0, [1]), sequence(1, range(9))],
            num_new_blocks=[1, 3],
            new_block_ids=[9, 8, 7, 6],
        ),
    )
    assert forward_batch(table, batch, flatten(batch), CPU).block_tables.tolist() == [[9, 0, 0], [8, 7, 6]]


def test_late_tokens_are_those_that_no_plan_brings() -> None:
    table = SequenceTable(max_model_len=64, vocab_size=100, num_blocks=32, block_size=4, reserves_sampled=True)
    new = [sequence(0, range(3)), sequence(1, range(9))]
    blocks: dict[str, Any] = {"num_new_blocks": [2, 3], "new_block_ids": range(5)}
    first = columns(0, (0, 0, 3), (1, 0, 4), samples=[True, False], new_sequences=new, **blocks)
    late = [places_of_late_tokens(table, first)]
    late.append(places_of_late_tokens(table, columns(1, (1, 4, 5), (0, 3, 1))))
    late.append(places_of_late_tokens(table, columns(2, (1, 9, 1), (0, 4, 1))))
    assert late == [[], [5], None]


def test_without_run_ahead_no_token_is_late() -> None:
    table = SequenceTable(max_model_len=64, vocab_size=100, num_blocks=32, block_size=4)
    new = [sequence(0, range(3))]
    first = columns(0, (0, 0, 3), new_sequences=new, num_new_blocks=[1], new_block_ids=[0])
    assert places_of_late_tokens(table, first) == []
    assert places_of_late_tokens(table, columns(1, (0, 2, 1))) == []


def places_of_late_tokens(table: SequenceTable, plan: StepColumns) -> list[int] | None:
    late = flatten(applied(table, plan)).late
    return None if late is None else late.tolist()


def applied(table: SequenceTable, plan: StepColumns) -> Batch:
    batch = table.apply(plan)
    assert batch is not None
    return batch
