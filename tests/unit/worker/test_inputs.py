from __future__ import annotations

from dataclasses import replace

import torch

from services.worker.inputs import flatten, forward_batch, late_tokens, sampling_columns
from services.worker.sequences import SequenceTable
from shared.ids import BlockId
from shared.messages import SamplingParams
from tests.fakes.fake_worker_peers import plan, sequence

CPU = torch.device("cpu")


def test_prefill_chunk_and_decode_are_flattened_side_by_side() -> None:
    table = SequenceTable(max_model_len=64, vocab_size=100, num_blocks=32, block_size=4)
    table.apply(
        plan(
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
    batch = table.apply(
        plan(
            1,
            (5, 6, 1),
            (0, 3, 4),
            samples=[True, False],
            num_appended_tokens=[1, 0],
            appended_token_ids=[77],
        )
    )
    inputs = forward_batch(table, batch, flatten(batch), CPU)
    assert inputs.token_ids.tolist() == [77, 13, 14, 15, 16]
    assert inputs.positions.tolist() == [6, 3, 4, 5, 6]
    assert inputs.slot_mapping.tolist() == [1 * 4 + 2, 30 * 4 + 3, 8 * 4, 8 * 4 + 1, 8 * 4 + 2]
    assert inputs.query_start.tolist() == [0, 1, 5]
    assert inputs.context_lens.tolist() == [7, 7]
    assert inputs.block_tables.tolist() == [[5, 1], [30, 8]]
    assert inputs.sample_rows.tolist() == [0]
    columns = sampling_columns(table, batch)
    assert columns.position.tolist() == [7]
    assert (columns.temperature.tolist(), columns.top_k.tolist()) == ([1.0], [4])
    assert (columns.top_p.tolist(), columns.min_p.tolist(), columns.seed.tolist()) == ([0.5], [0.25], [9])


def test_sampled_position_is_the_same_after_recomputation() -> None:
    """Decode of the 7th token, and a prefill of all tokens so far in another row, sample for the same position."""
    table = SequenceTable(max_model_len=64, vocab_size=100, num_blocks=32, block_size=16)
    new = [sequence(0, range(6))]
    table.apply(plan(0, (0, 0, 6), new_sequences=new, num_new_blocks=[1], new_block_ids=[0]))
    decode = table.apply(plan(1, (0, 6, 1), num_appended_tokens=[1], appended_token_ids=[6]))
    new = [sequence(1, range(7))]
    again = table.apply(plan(2, (1, 0, 7), new_sequences=new, num_new_blocks=[1], new_block_ids=[1]))
    assert sampling_columns(table, decode).position == sampling_columns(table, again).position == [7]


def test_block_tables_are_padded_with_zeros() -> None:
    table = SequenceTable(max_model_len=64, vocab_size=100, num_blocks=32, block_size=4)
    batch = table.apply(
        plan(
            0,
            (0, 0, 1),
            (1, 0, 9),
            new_sequences=[sequence(0, [1]), sequence(1, range(9))],
            num_new_blocks=[1, 3],
            new_block_ids=[9, 8, 7, 6],
        )
    )
    assert forward_batch(table, batch, flatten(batch), CPU).block_tables.tolist() == [[9, 0, 0], [8, 7, 6]]


def test_late_tokens_are_those_that_no_plan_brings() -> None:
    table = SequenceTable(max_model_len=64, vocab_size=100, num_blocks=32, block_size=4, reserves_sampled=True)
    new = [sequence(0, range(3)), sequence(1, range(9))]
    first = plan(0, (0, 0, 3), (1, 0, 4), samples=[True, False], new_sequences=new)
    batch = table.apply(replace(first, num_new_blocks=[2, 3], new_block_ids=[BlockId(block) for block in range(5)]))
    assert late_tokens(table, flatten(batch)).tolist() == []
    batch = table.apply(plan(1, (1, 4, 5), (0, 3, 1)))
    assert late_tokens(table, flatten(batch)).tolist() == [5]
    batch = table.apply(plan(2, (1, 9, 1), (0, 4, 1)))
    assert late_tokens(table, flatten(batch)).tolist() == [0, 1]
