"""How likely tokens were: log probabilities of a token and of the most likely ones in its place.

Of the model's own logits, before bias, penalties, temperature and masks, as OpenAI and vLLM have it: what the model
thinks, not what the request made of it. Always finite: what is less likely than ``FLOOR`` says, impossible or not a
number counts as ``FLOOR``, vLLM's number for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

import kernels
from shared.messages import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["FLOOR", "Scores", "score"]

FLOOR = -9999.0
"""The least log probability that is ever told."""


class Scores(NamedTuple):
    """Log probabilities in n places, on the host; messages are made of them where there is time."""

    logprobs: Tensor
    """[n] float32, of the token that came."""
    top_ids: Tensor
    """[n, k] int64, the most likely tokens, the most likely first."""
    top_logprobs: Tensor
    """[n, k] float32"""

    def messages(self, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """Return one message for each place, with ``num_top`` [n] of its most likely tokens."""
        rows = zip(self.logprobs.tolist(), self.top_ids.tolist(), self.top_logprobs.tolist(), num_top, strict=True)
        return [
            TokenLogprobs(logprob, tuple(zip(token_ids[:count], logprobs[:count], strict=True)))
            for logprob, token_ids, logprobs, count in rows
        ]


def score(logits: Tensor, token_ids: Tensor, num_top: int) -> Scores:
    """Score ``token_ids`` [n] by ``logits`` [n, vocab_size], with ``num_top`` of the most likely tokens each."""
    logits = logits.float()
    top, top_ids = kernels.most_probable(logits, min(num_top, logits.shape[-1]))
    chosen = logits.gather(-1, token_ids.unsqueeze(-1))
    logprobs = torch.cat((chosen, top), dim=-1) - logits.logsumexp(dim=-1, keepdim=True)
    logprobs = logprobs.nan_to_num_(nan=FLOOR, posinf=0.0, neginf=FLOOR).clamp_(min=FLOOR).cpu()
    return Scores(logprobs[:, 0], top_ids.cpu(), logprobs[:, 1:])
