from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from services.worker.sequences import MAX_ROWS, SequenceTable
from shared.errors import ProtocolError
from shared.messages import SamplingParams
from tests.fakes.fake_worker_peers import columns, sequence

MAX_MODEL_LEN = 40
BLOCK_SIZE = 4


def make_table(**fields: Any) -> SequenceTable:
    defaults: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": 100,
        "num_blocks": 12,
        "block_size": BLOCK_SIZE,
    }
    return SequenceTable(**{**defaults, **fields})


def table_with_one_row() -> SequenceTable:
    table = make_table()
    table.apply(columns(0, (0, 0, 5), new_sequences=[sequence(0, range(5))], num_new_blocks=[2], new_block_ids=[1, 2]))
    return table


def test_batch_is_what_the_plan_says() -> None:
    table = make_table()
    batch = table.apply(
        columns(
            0,
            (3, 0, 2),
            (1, 4, 1),
            samples=[False, True],
            new_sequences=[sequence(1, range(5)), sequence(3, [7, 8, 9])],
            num_new_blocks=[1, 2],
            new_block_ids=[11, 4, 0],
        )
    )
    assert batch is not None
    assert batch.rows.tolist() == [3, 1]
    assert batch.num_computed_tokens.tolist() == [0, 4]
    assert batch.num_tokens.tolist() == [2, 1]
    assert batch.samples.tolist() == [False, True]
    assert (batch.context_lens.tolist(), batch.longest, batch.is_decode) == ([2, 5], 5, False)
    assert table.token_ids[3, :3].tolist() == [7, 8, 9]
    assert table.block_ids[1, :2].tolist() == [4, 0]
    assert table.num_sequences == 2


def test_appended_tokens_and_blocks_go_to_their_rows() -> None:
    table = make_table()
    new = [sequence(0, [1, 2, 3]), sequence(1, [4])]
    table.apply(columns(0, (0, 0, 3), (1, 0, 1), new_sequences=new, num_new_blocks=[1, 1], new_block_ids=[5, 6]))
    table.apply(
        columns(
            1,
            (1, 1, 1),
            (0, 3, 2),
            num_appended_tokens=[1, 2],
            appended_token_ids=[40, 10, 20],
            num_new_blocks=[0, 1],
            new_block_ids=[9],
        )
    )
    assert table.token_ids[0, :5].tolist() == [1, 2, 3, 10, 20]
    assert table.token_ids[1, :2].tolist() == [4, 40]
    assert table.block_ids[0, :2].tolist() == [5, 9]
    assert table.block_ids[1, :1].tolist() == [6]


def test_a_place_is_reserved_for_each_token_that_will_be_sampled() -> None:
    table = make_table(reserves_sampled=True)
    new = [sequence(0, [1, 2, 3]), sequence(1, range(MAX_MODEL_LEN)), sequence(2, [5, 6])]
    table.apply(
        columns(
            0,
            (0, 0, 3),
            (1, 0, MAX_MODEL_LEN),
            (2, 0, 1),
            samples=[True, True, False],  # the second has no place left
            new_sequences=new,
            num_new_blocks=[1, 10, 1],
            new_block_ids=range(12),
        )
    )
    table.apply(columns(1, (0, 3, 1), (2, 1, 1), samples=[False, True]))
    assert table.num_given_tokens[:3].tolist() == [3, MAX_MODEL_LEN, 2]
    with pytest.raises(ProtocolError, match="only 4 are known"):
        table.apply(columns(2, (0, 4, 1)))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (columns(3, (0, 3, 2)), "computes token 3 of row 0, which was sampled here and is not kept"),
        (columns(3, (0, 0, 5)), "computes token 3 of row 0"),
        (columns(3, (0, 5, 1), num_appended_tokens=[1], appended_token_ids=[7]), "brings tokens for row 0"),
    ],
)
def test_of_the_tokens_sampled_here_a_plan_asks_for_the_last_alone(bad: Any, message: str) -> None:
    table = make_table(reserves_sampled=True)
    new = [sequence(0, [1, 2, 3])]
    table.apply(columns(0, (0, 0, 3), new_sequences=new, num_new_blocks=[2], new_block_ids=[0, 1]))
    table.apply(columns(1, (0, 3, 1)))
    table.apply(columns(2))
    with pytest.raises(ProtocolError, match=message):
        table.apply(bad)


def test_released_row_is_clean_when_it_is_used_again() -> None:
    table = table_with_one_row()
    table.apply(columns(1, released_rows=[0]))
    assert table.num_sequences == 0
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=2**64 - 1)
    table.apply(columns(2, (0, 0, 1), new_sequences=[sequence(0, [9], params)], num_new_blocks=[1], new_block_ids=[7]))
    assert table.block_ids[0, :3].tolist() == [7, 0, 0]
    assert (table.temperature[0], table.top_k[0], table.top_p[0], table.min_p[0]) == (0.5, 3, 0.25, 0.125)
    assert int(table.seed[0]) == 2**64 - 1


def test_release_and_reuse_in_one_message() -> None:
    table = table_with_one_row()
    table.apply(
        columns(
            1, (0, 0, 1), released_rows=[0], new_sequences=[sequence(0, [9])], num_new_blocks=[1], new_block_ids=[3]
        )
    )
    assert table.token_ids[0, 0] == 9


def test_table_grows_and_keeps_what_it_holds() -> None:
    table = make_table(max_model_len=4096, num_blocks=4096)
    for row in (0, 70, 500):
        table.apply(
            columns(
                row,
                (row, 0, 5),
                new_sequences=[sequence(row, [row % 100] * (5 + row))],
                num_new_blocks=[2 + row],
                new_block_ids=list(range(2 + row)),
            )
        )
    for row in (0, 70, 500):
        assert set(table.token_ids[row, : 5 + row].tolist()) == {row % 100}
        assert table.block_ids[row, : 2 + row].tolist() == list(range(2 + row))


def row_zero(**fields: Any) -> dict[str, Any]:
    return {"new_sequences": [sequence(0, [1])], "num_new_blocks": [1], "new_block_ids": [0], **fields}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (columns(1, released_rows=[1]), "releases row 1, which holds no sequence"),
        (columns(1, released_rows=[0, 0]), "releases row 0"),
        (columns(1, released_rows=[2**32 - 1]), "releases row"),
        (columns(1, new_sequences=[sequence(0, [1])]), "row 0, which is in use"),
        (columns(1, new_sequences=[sequence(MAX_ROWS, [1])]), f"the last row is {MAX_ROWS - 1}"),
        (columns(1, new_sequences=[sequence(1, [])]), "sequence of 0 tokens"),
        (columns(1, new_sequences=[sequence(1, [1] * (MAX_MODEL_LEN + 1))]), "sequences have 1 to 40 tokens"),
        (columns(1, new_sequences=[sequence(1, [5, 100])]), "token id 100"),
        (columns(1, new_sequences=[sequence(1, [2**32 - 1])]), "token id 4294967295"),
        (columns(1, new_sequences=[sequence(1, [1], SamplingParams(temperature=float("nan")))]), "temperature"),
        (columns(1, new_sequences=[sequence(1, [1], SamplingParams(temperature=-1))]), "temperature"),
        (columns(1, new_sequences=[sequence(1, [1], SamplingParams(top_p=0.0))]), "top_p"),
        (columns(1, new_sequences=[sequence(1, [1], SamplingParams(min_p=1.5))]), "min_p"),
        (columns(1, (1, 0, 1)), "row 1, which holds no sequence"),
        (columns(1, (2**32 - 1, 0, 1)), "holds no sequence"),
        (columns(1, (0, 0, 1), (0, 1, 1)), "a row twice"),
        (columns(1, (0, 0, 0)), "no token of row 0"),
        (columns(1, (0, 5, 1)), "up to token 6, but only 5 are known"),
        (columns(1, (0, 2**32 - 1, 2**32 - 1)), "are known"),
        (columns(1, (0, 5, 1), num_appended_tokens=[1], appended_token_ids=[100]), "token id 100"),
        (
            columns(1, (0, 5, 1), num_appended_tokens=[36], appended_token_ids=[1] * 36),
            "makes row 0 41 tokens long",
        ),
        (columns(1, (0, 5, 4), num_appended_tokens=[4], appended_token_ids=[1] * 4), "2 blocks hold 8"),
        (columns(1, (0, 4, 1), num_new_blocks=[1], new_block_ids=[12]), "block 12; this worker has blocks 0 to 11"),
        (columns(1, (0, 4, 1), num_new_blocks=[9], new_block_ids=[0] * 9), "10 hold the longest sequence"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(bad: Any, message: str) -> None:
    with pytest.raises(ProtocolError, match=message) as failure:
        table_with_one_row().apply(bad)
    assert str(failure.value).startswith("step 1")


def test_prompt_longer_than_its_sequence_is_refused() -> None:
    from dataclasses import replace

    broken = replace(sequence(0, [1, 2]), num_prompt_tokens=3)
    with pytest.raises(ProtocolError, match="with a prompt of 3"):
        make_table().apply(columns(0, new_sequences=[broken]))


@pytest.mark.parametrize("seed", range(20))
def test_random_diffs_agree_with_plain_lists(seed: int) -> None:
    rng = random.Random(seed)
    table = make_table()
    tokens: dict[int, list[int]] = {}
    blocks: dict[int, list[int]] = {}
    for step_id in range(60):
        released = [row for row in tokens if rng.random() < 0.1]
        for row in released:
            del tokens[row], blocks[row]
        new = []
        for row in rng.sample(range(200), 3):
            if row not in tokens and len(tokens) < 20:
                tokens[row] = [rng.randrange(100) for _ in range(rng.randint(1, 9))]
                blocks[row] = []
                new.append(sequence(row, tokens[row]))
        rows = rng.sample(sorted(tokens), min(len(tokens), 6))
        appended = [[rng.randrange(100) for _ in range(rng.randint(0, min(2, 40 - len(tokens[row]))))] for row in rows]
        added = []
        for row, ids in zip(rows, appended, strict=True):
            tokens[row] = tokens[row] + ids
            missing = -(-len(tokens[row]) // BLOCK_SIZE) - len(blocks[row])
            added.append([rng.randrange(12) for _ in range(missing)])
            blocks[row] = blocks[row] + added[-1]
        table.apply(
            columns(
                step_id,
                *((row, len(tokens[row]) - 1, 1) for row in rows),
                released_rows=released,
                new_sequences=new,
                num_appended_tokens=[len(ids) for ids in appended],
                appended_token_ids=[token for ids in appended for token in ids],
                num_new_blocks=[len(ids) for ids in added],
                new_block_ids=[block for ids in added for block in ids],
            )
        )
        for row, known in tokens.items():
            assert table.token_ids[row, : len(known)].tolist() == known
            assert table.block_ids[row, : len(blocks[row])].tolist() == blocks[row]
    assert table.num_sequences == len(tokens)
    assert table.token_ids.dtype == np.int32


def test_a_row_that_was_computed_and_released_since_is_refused() -> None:
    table = table_with_one_row()
    table.apply(columns(1, (0, 4, 1)))
    with pytest.raises(ProtocolError, match="computes row 0, which holds no sequence"):
        table.apply(columns(2, (0, 4, 1), released_rows=[0]))
