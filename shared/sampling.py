"""Which sampling parameters make sense, for everyone who must not take the word of the one before."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.messages import SamplingParams

__all__ = [
    "MAX_LOGIT_BIAS",
    "MAX_LOGIT_BIASES",
    "MAX_LOGPROBS",
    "MAX_PENALTY",
    "MAX_REPETITION_PENALTY",
    "sampling_fault",
]

MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
"""Most likely tokens that a log probability comes with."""


def sampling_fault(params: SamplingParams) -> str | None:
    """Return what is wrong with parameters, None where nothing is; not-a-number is out of every range."""
    valid = {
        "temperature": 0 <= params.temperature < math.inf,
        "top_k": params.top_k >= 0,
        "top_p": 0 < params.top_p <= 1,
        "min_p": 0 <= params.min_p <= 1,
        "seed": 0 <= params.seed < 1 << 64,
        "repetition_penalty": 0 < params.repetition_penalty <= MAX_REPETITION_PENALTY,
        "presence_penalty": -MAX_PENALTY <= params.presence_penalty <= MAX_PENALTY,
        "frequency_penalty": -MAX_PENALTY <= params.frequency_penalty <= MAX_PENALTY,
        "logit_bias": len(params.logit_bias) <= MAX_LOGIT_BIASES
        and all(token_id >= 0 and -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS for token_id, bias in params.logit_bias),
        "min_tokens": params.min_tokens >= 0,
        "num_logprobs": params.num_logprobs is None or 0 <= params.num_logprobs <= MAX_LOGPROBS,
    }
    return next((f"{name} cannot be {getattr(params, name)}" for name, is_valid in valid.items() if not is_valid), None)
