"""A stage of known step time and known output, for tests and benchmarks of everything but the model.

Every rank takes ``step_ms`` and ``token_us`` for each token of the iteration, then passes real activations on: each
token's position travels through the stages, and the last one turns it into a letter of a fixed sentence. The output is
the same at every topology, and wrong as soon as one activation is lost or swapped. There are no weights and no K/V.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from services.worker.batch import ForwardBatch
    from services.worker.kv_cache import KvCache
    from shared.model.source import SyntheticModel

__all__ = ["HIDDEN_SIZE", "KV_BYTES_PER_LAYER_TOKEN", "SyntheticStage", "synthetic_token"]

HIDDEN_SIZE = 8
"""Small, but real: activations move through torch.distributed."""

KV_BYTES_PER_LAYER_TOKEN = 1536
"""What K and V of one token would take in one layer (3 heads of 64, float32, as in the default model)."""

_SENTENCE = torch.frombuffer(bytearray(b"the quick brown fox jumps over the lazy dog "), dtype=torch.uint8).long()
_LIKELY = 1e4
_SPIN_S = 100e-6


def synthetic_token(position: int) -> int:
    """Return the token that every sequence has at ``position``: a printable ASCII code."""
    return int(_SENTENCE[position % len(_SENTENCE)])


class SyntheticStage:
    """What the executor runs in place of a model's stage."""

    def __init__(self, source: SyntheticModel, device: torch.device) -> None:
        self._step_s = source.step_ms / 1e3
        self._token_s = source.token_us / 1e6
        self._vocab_size = source.vocab_size
        self._sentence = _SENTENCE.to(device)

    def forward(self, batch: ForwardBatch, hidden: Tensor | None, kv: KvCache) -> Tensor:
        """Take as long as a stage would, and return [num_tokens, HIDDEN_SIZE] float32."""
        del kv
        deadline = time.perf_counter() + self._step_s + self._token_s * batch.num_tokens
        if hidden is None:
            hidden = batch.positions.to(torch.float32).unsqueeze(-1).repeat(1, HIDDEN_SIZE)
        _wait_until(deadline)
        return hidden

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """Return [num_rows, vocab_size] float32, one token of each row with all the probability."""
        positions = hidden_rows[:, 0].round().long() + 1
        tokens = self._sentence[positions % len(self._sentence)]
        logits = torch.zeros((len(tokens), self._vocab_size), device=hidden_rows.device)
        return logits.scatter_(1, tokens.unsqueeze(-1), _LIKELY)


def _wait_until(deadline: float) -> None:
    """Let other threads run until ``deadline``; the last moment is spun away, since waking up takes that long."""
    remaining = deadline - time.perf_counter()
    if remaining > _SPIN_S:
        threading.Event().wait(remaining - _SPIN_S)
    while time.perf_counter() < deadline:
        pass
