"""Which sampling parameters make sense, for everyone who must not take the word of the one before."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.messages import SamplingParams

__all__ = ["sampling_fault"]


def sampling_fault(params: SamplingParams) -> str | None:
    """Return what is wrong with parameters, None where nothing is; not-a-number is out of every range."""
    valid = {
        "temperature": 0 <= params.temperature < math.inf,
        "top_k": params.top_k >= 0,
        "top_p": 0 < params.top_p <= 1,
        "min_p": 0 <= params.min_p <= 1,
        "seed": 0 <= params.seed < 1 << 64,
    }
    return next((f"{name} cannot be {getattr(params, name)}" for name, is_valid in valid.items() if not is_valid), None)
