"""What Hugging Face transformers generates greedily, and how sure it is of each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Reference", "assert_same_or_near_tie"]

NEAR_TIE = 1e-3
"""Two logits closer than this may swap their order by rounding alone."""


@dataclass(frozen=True)
class Reference:
    """A transformers model in float32."""

    model: Any

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy tokens after the prompt, past any end-of-sequence id."""
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    def logits_after(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits of the token that follows."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([list(tokens)])).logits[0, -1]
        return logits


def assert_same_or_near_tie(
    reference: Reference, prompt: Sequence[int], expected: Sequence[int], actual: Sequence[int]
) -> None:
    """The same tokens; where they part, the reference itself must be undecided between the two."""
    assert len(actual) == len(expected)
    for index, (want, got) in enumerate(zip(expected, actual, strict=True)):
        if want == got:
            continue
        logits = reference.logits_after([*prompt, *expected[:index]])
        gap = float(logits[want] - logits[got])
        best = logits.topk(2)
        assert got in best.indices.tolist(), f"token {index}: {got} is not among the reference's two best"
        assert abs(gap) < NEAR_TIE, f"token {index}: expected {want}, got {got}, logits {gap} apart"
        return  # what follows another token cannot be compared
