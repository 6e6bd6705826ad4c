"""What the workers can hold and do, and hence which requests can ever be served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.sampling import sampling_fault

if TYPE_CHECKING:
    from shared.messages import Submit

__all__ = ["Capacity"]


@dataclass(frozen=True, slots=True)
class Capacity:
    """The smallest of all ranks where they differ."""

    num_blocks: int
    block_size: int
    num_stages: int
    max_model_len: int
    vocab_size: int

    @property
    def num_slots(self) -> int:
        """K/V slots in all (``n_slots`` of Algorithm 1)."""
        return self.num_blocks * self.block_size

    def fault_of(self, request: Submit) -> str | None:
        """Why a request can never be served as it is, or None. Gateways check the same; their word is not taken."""
        num_prompt, num_output = len(request.prompt_token_ids), len(request.output_token_ids)
        if num_prompt == 0:
            return "the prompt has no tokens; give at least one"
        only_scores = request.max_tokens == 0 and request.num_prompt_logprobs is not None
        if not (num_output < request.max_tokens or only_scores):
            return f"max_tokens is {request.max_tokens}; it must be at least 1 more than the output so far"
        if (fault := self.size_fault(num_prompt, request.max_tokens)) is not None:
            return fault
        named = [max(ids) for ids in (request.prompt_token_ids, request.output_token_ids) if ids]
        if max(named) >= self.vocab_size:
            return f"token id {max(named)} is outside the vocabulary (0 to {self.vocab_size - 1})"
        biased = max((token_id for token_id, _ in request.sampling.logit_bias), default=0)
        if biased >= self.vocab_size:
            return f"logit_bias names token id {biased}, outside the vocabulary (0 to {self.vocab_size - 1})"
        return sampling_fault(request.sampling)

    def size_fault(self, num_prompt: int, max_tokens: int) -> str | None:
        """Why a request of this size can never be served, or None."""
        total = num_prompt + max_tokens
        asked = f"prompt ({num_prompt} tokens) and max_tokens ({max_tokens}) add up to {total}"
        if total > self.max_model_len:
            return f"{asked}, over the context of {self.max_model_len} tokens; shorten the prompt or lower max_tokens"
        if total > self.num_slots:
            return f"{asked}, over the {self.num_slots} K/V slots of the engine; lower max_tokens or raise --kv-memory"
        return None
