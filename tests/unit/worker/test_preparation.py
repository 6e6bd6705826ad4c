"""What goes along with a step: wishes of the sequences that have any, pieces of prompts to score."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from services.worker.preparation import StepPreparer
from services.worker.sampling.guidance import Vocabulary
from shared.errors import ProtocolError
from shared.messages import Joined, SamplingParams
from shared.text.byte_tokenizer import ByteTokenizer
from tests.fakes.fake_worker_peers import columns, join_request, sequence

if TYPE_CHECKING:
    from services.worker.preparation import PreparedStep
    from shared.codec.step_columns import StepColumns
    from shared.messages import NewSequence

VOCAB_SIZE = 300


def preparer(**rank: Any) -> StepPreparer:
    joined = Joined(
        num_blocks=8, max_model_len=64, vocab_size=VOCAB_SIZE, dtype="", weights_bytes=0, kv_bytes_per_block=1
    )
    vocabulary = Vocabulary(lambda: ByteTokenizer(VOCAB_SIZE), VOCAB_SIZE)
    return StepPreparer(join_request(**rank), joined, vocabulary, torch.device("cpu"))


def prepared(by: StepPreparer, step: StepColumns) -> PreparedStep:
    found = by.prepare(step)
    assert found is not None
    return found


def penalised(row: int) -> NewSequence:
    return sequence(row, range(9), SamplingParams(presence_penalty=1.0))


def scored(row: int, num_top: int = 2) -> NewSequence:
    return replace(sequence(row, range(10, 19)), num_prompt_logprobs=num_top, num_prompt_tokens=7)


def first_plan(*new: NewSequence) -> StepColumns:
    return columns(
        0,
        *((one.row, 0, len(one.token_ids)) for one in new),
        new_sequences=new,
        num_new_blocks=[1] * len(new),
        new_block_ids=range(len(new)),
    )


def test_wishes_go_along_with_the_steps_that_sample_until_the_row_is_released() -> None:
    by = preparer()
    step = prepared(by, first_plan(sequence(0, [1]), penalised(1), sequence(2, [1]), penalised(3)))
    assert [place for place, _ in step.wishes] == [1, 3]
    second = columns(1, (3, 8, 1), (1, 8, 1), (0, 0, 1), samples=[True, False, True])
    assert [(place, wish is step.wishes[1][1]) for place, wish in prepared(by, second).wishes] == [(0, True)]
    reused = columns(
        2, (3, 0, 1), released_rows=[3], new_sequences=[sequence(3, [1])], num_new_blocks=[1], new_block_ids=[7]
    )
    assert prepared(by, reused).wishes == []


def test_wish_released_without_a_step_is_gone() -> None:
    by = preparer()
    prepared(by, first_plan(penalised(0), scored(1)))
    assert by.prepare(columns(1, released_rows=[0, 1])) is None
    again = prepared(by, first_plan(sequence(0, [1]), sequence(1, [1])))
    assert (again.wishes, again.prompt_pieces) == ([], [])


def test_pieces_of_a_prompt_leave_out_its_first_token_and_the_output() -> None:
    by = preparer()
    new = [sequence(1, [1, 2]), scored(0)]
    blocks: dict[str, Any] = {"num_new_blocks": [1, 1], "new_block_ids": [0, 1], "samples": [True, False]}
    (piece,) = prepared(by, columns(0, (1, 0, 2), (0, 0, 4), new_sequences=new, **blocks)).prompt_pieces
    assert (piece.place, piece.first_position, piece.first_row, piece.num_top) == (1, 1, 2, 2)
    assert piece.token_ids.tolist() == [11, 12, 13, 14]
    (piece,) = prepared(by, columns(1, (0, 4, 5))).prompt_pieces
    assert (piece.place, piece.first_position, piece.first_row) == (0, 5, 0)
    assert piece.token_ids.tolist() == [15, 16]
    assert prepared(by, columns(2, (0, 6, 3))).prompt_pieces == []


@pytest.mark.parametrize(
    ("rank", "samples", "scores"),
    [
        ({"stage": 0, "num_stages": 2}, False, False),
        ({"stage": 1, "num_stages": 2}, True, True),
        ({"tp_rank": 1, "tp_size": 2}, False, True),
        ({"tp_rank": 1, "tp_size": 2, "workers_append_tokens": True}, True, True),
    ],
    ids=["first_stage", "last_stage", "other_rank", "other_rank_that_appends"],
)
def test_only_ranks_that_use_wishes_keep_them(rank: dict[str, Any], *, samples: bool, scores: bool) -> None:
    step = prepared(preparer(**rank), first_plan(penalised(0), scored(1)))
    assert bool(step.wishes) == samples
    assert bool(step.prompt_pieces) == scores


def test_too_many_log_probabilities_are_refused() -> None:
    with pytest.raises(ProtocolError, match="num_prompt_logprobs cannot be 21"):
        preparer().prepare(first_plan(scored(0, num_top=21)))


def test_parameters_go_along_only_where_a_token_is_drawn() -> None:
    by = preparer()
    drawing = sequence(1, [1], SamplingParams(temperature=0.5))
    step = prepared(by, first_plan(sequence(0, [1]), drawing))
    assert step.sampling is not None
    assert step.sampling.temperature.tolist() == [0.0, 0.5]
    assert prepared(by, columns(1, (0, 0, 1))).sampling is None
    assert by.prepare(columns(2, released_rows=[1])) is None
    reused = columns(3, (1, 0, 1), new_sequences=[sequence(1, [1])], num_new_blocks=[1], new_block_ids=[7])
    assert prepared(by, reused).sampling is None
