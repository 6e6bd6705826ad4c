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

from services.worker.batch import device_column
from services.worker.inputs import flatten, forward_batch, late_tokens, sampling_columns
from services.worker.sequences import SequenceTable

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from services.worker.batch import ForwardBatch
    from services.worker.inputs import FlatTokens
    from services.worker.sampler import SamplingColumns
    from shared.messages import Joined, JoinRequest, StepPlan

__all__ = ["LateTokens", "PreparedStep", "StepPreparer"]


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
    sampling: SamplingColumns
    """Of the same S sequences."""


class StepPreparer:
    """Knows the sequences of one epoch; used by one thread, plan after plan."""

    def __init__(self, request: JoinRequest, joined: Joined, device: torch.device) -> None:
        self._device = device
        self._table = SequenceTable(
            max_model_len=joined.max_model_len,
            vocab_size=joined.vocab_size,
            num_blocks=joined.num_blocks,
            block_size=request.block_size,
            reserves_sampled=request.workers_append_tokens,
        )

    def prepare(self, plan: StepPlan) -> PreparedStep | None:
        """Return the step of ``plan``, None where it computes nothing.

        Raises ``ProtocolError`` when the plan does not fit; no plan after it can be prepared then.
        """
        batch = self._table.apply(plan)
        if not batch.rows.size:
            return None
        flat = flatten(batch)
        return PreparedStep(
            inputs=forward_batch(self._table, batch, flat, self._device),
            late=self._late_tokens(flat),
            sampled_rows=self._column(batch.rows[batch.samples]),
            sampling=sampling_columns(self._table, batch),
        )

    def _late_tokens(self, flat: FlatTokens) -> LateTokens | None:
        places = late_tokens(self._table, flat)
        if not places.size:
            return None
        is_all = places.size == flat.rows.size
        return LateTokens(None if is_all else self._column(places), self._column(flat.rows[places]))

    def _column(self, values: NDArray[np.int64]) -> Tensor:
        return device_column(values, np.int64, self._device)
