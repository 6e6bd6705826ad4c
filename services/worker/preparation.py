"""From a control message to a step that is ready to be computed.

Steps are prepared where plans arrive, on the event loop's thread, while the step before computes: the compute thread
finds tensors. All that may be missing are *late* tokens, those that the steps before sample here (run-ahead).
``PreparedStep`` says which they are, and the compute thread, which is strictly in order, fills them in from the last
token of each row. No row's first tokens are late, so whoever gets a row next never sees the token of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.worker.batch import on_device
from services.worker.inputs import flatten, forward_batch, sampling_columns
from services.worker.sampling.guidance import GrammarCompiler, Guided
from services.worker.sampling.logit_rules import logit_rules
from services.worker.sampling.prompt_scores import PromptPiece
from services.worker.sampling.sampler import Wishes
from services.worker.sequences import SequenceTable

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from services.worker.batch import ForwardBatch
    from services.worker.inputs import FlatTokens
    from services.worker.sampling.drawing import SamplingColumns
    from services.worker.sampling.guidance import Vocabulary
    from services.worker.sequences import Batch
    from shared.codec.step_columns import StepColumns
    from shared.messages import Joined, JoinRequest, NewSequence

__all__ = ["LateTokens", "PreparedStep", "StepPreparer", "makes_logits", "samples_tokens"]


@dataclass(frozen=True, slots=True)
class LateTokens:
    """The L tokens of an iteration that are sampled here before it is computed; both tensors on the stage's device."""

    places: Tensor | None
    """[L] int64, where they go in the flattened batch; None: everywhere, one after the other."""
    rows: Tensor
    """[L] int64, the rows whose last token they are."""

    def fill(self, token_ids: Tensor, last_token_ids: Tensor) -> None:
        """Put them into ``token_ids`` [T]; ``last_token_ids`` [rows] are the tokens that were sampled last."""
        if self.places is None:
            torch.index_select(last_token_ids, 0, self.rows, out=token_ids)
        else:
            token_ids.index_copy_(0, self.places, last_token_ids.index_select(0, self.rows))


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """All that one iteration takes, late tokens aside."""

    inputs: ForwardBatch
    late: LateTokens | None
    sampled_rows: Tensor
    """[S] int64 on the stage's device, the rows that a token is sampled for."""
    sampling: SamplingColumns | None
    """Of the same S sequences; None where the largest logit of each of them is all that matters."""
    wishes: list[tuple[int, Wishes]]
    """Of those of the S sequences that have any, with their places, rising."""
    prompt_pieces: list[PromptPiece]
    """Tokens of prompts to score."""


def makes_logits(request: JoinRequest) -> bool:
    """Return whether a rank makes logits: all those of the last stage, together."""
    return request.stage == request.num_stages - 1


def samples_tokens(request: JoinRequest) -> bool:
    """Return whether a rank samples. All ranks have the same logits to the last bit, hence the same tokens."""
    return makes_logits(request) and (request.tp_rank == 0 or request.workers_append_tokens)


class StepPreparer:
    """Knows the sequences of one epoch; used by one thread, plan after plan."""

    def __init__(self, request: JoinRequest, joined: Joined, vocabulary: Vocabulary, device: torch.device) -> None:
        self._device = device
        self._vocab_size = joined.vocab_size
        self._makes_logits = makes_logits(request)
        self._samples = samples_tokens(request)
        self._grammars = GrammarCompiler(vocabulary)
        self._wishes: dict[int, Wishes] = {}
        """By row, of the sequences that have any."""
        self._drawing: set[int] = set()
        """Rows whose tokens are drawn at random."""
        self._scored_prompts: dict[int, tuple[int, int]] = {}
        """By row: tokens of the prompt, and how many of the most likely ones are told for each."""
        self._table = SequenceTable(
            max_model_len=joined.max_model_len,
            vocab_size=joined.vocab_size,
            num_blocks=joined.num_blocks,
            block_size=request.block_size,
            reserves_sampled=request.workers_append_tokens,
        )

    def prepare(self, plan: StepColumns) -> PreparedStep | None:
        """Return the step of ``plan``, None where it computes nothing.

        Raises ``ProtocolError`` when the plan does not fit; no plan after it can be prepared then.
        """
        batch = self._table.apply(plan)
        for row in plan.released_rows:
            self._wishes.pop(row, None)
            self._scored_prompts.pop(row, None)
            self._drawing.discard(row)
        for sequence in plan.new_sequences:
            self._learn(sequence)
        if batch is None:
            return None
        flat = flatten(batch)
        rows, positions = batch.rows, batch.context_lens
        if not batch.all_sample:
            rows, positions = rows[batch.samples], positions[batch.samples]
        wishes = self._wishes_of(rows) if self._wishes else []
        sampling = None
        if wishes or self._drawing:
            columns = sampling_columns(self._table, rows, positions)
            sampling = columns if wishes or not columns.greedy().all() else None
        return PreparedStep(
            inputs=forward_batch(self._table, batch, flat, self._device),
            late=self._late_tokens(flat),
            sampled_rows=self._column(rows),
            sampling=sampling,
            wishes=wishes,
            prompt_pieces=self._prompt_pieces(batch, flat) if self._scored_prompts else [],
        )

    def close(self) -> None:
        """Let go of what works in the background."""
        self._grammars.close()

    def _learn(self, sequence: NewSequence) -> None:
        if self._makes_logits and sequence.num_prompt_logprobs is not None:
            self._scored_prompts[sequence.row] = (sequence.num_prompt_tokens, sequence.num_prompt_logprobs)
        if not self._samples:
            return
        row = np.array([sequence.row])
        if not sampling_columns(self._table, row, row).greedy().all():
            self._drawing.add(sequence.row)
        rules = logit_rules(sequence, self._vocab_size, self._device)
        if sequence.grammar:
            output = sequence.token_ids[sequence.num_prompt_tokens :]
            rules.append(Guided(self._grammars.compile(sequence.grammar, output)))
        if rules or sequence.sampling.num_logprobs is not None:
            self._wishes[sequence.row] = Wishes(tuple(rules), sequence.sampling.num_logprobs)

    def _wishes_of(self, rows: NDArray[np.int64]) -> list[tuple[int, Wishes]]:
        return [(place, self._wishes[row]) for place, row in enumerate(rows.tolist()) if row in self._wishes]

    def _prompt_pieces(self, batch: Batch, flat: FlatTokens) -> list[PromptPiece]:
        pieces = []
        for place, row in enumerate(batch.rows.tolist()):
            if row not in self._scored_prompts:
                continue
            num_prompt_tokens, num_top = self._scored_prompts[row]
            first = int(batch.num_computed_tokens[place]) + 1
            end = min(first + int(batch.num_tokens[place]), num_prompt_tokens)
            if first < end:
                token_ids = self._column(self._table.token_ids[row, first:end].astype(np.int64))
                pieces.append(PromptPiece(place, first, int(flat.query_start[place]), token_ids, num_top))
        return pieces

    def _late_tokens(self, flat: FlatTokens) -> LateTokens | None:
        if flat.late is None:
            return LateTokens(None, self._column(flat.rows))
        if not flat.late.size:
            return None
        return LateTokens(*on_device(self._device, flat.late, flat.rows[flat.late]))

    def _column(self, values: NDArray[np.int64]) -> Tensor:
        (column,) = on_device(self._device, values)
        return column
