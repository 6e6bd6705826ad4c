"""Where a model's weights come from, as plain data: the result of resolving what the user typed after ``--model``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["GgufFile", "HfFolder", "ModelSource", "RandomModel", "SyntheticModel"]


@dataclass(frozen=True, slots=True)
class HfFolder:
    """A folder in Hugging Face layout: ``config.json``, safetensors (sharded or not), ``tokenizer.json``."""

    path: Path


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One GGUF file: weights, architecture and tokenizer together."""

    path: Path


@dataclass(frozen=True, slots=True)
class RandomModel:
    """Random weights of a named shape, the same for the same seed at every topology (``random:<shape>[:<seed>]``).

    The tokenizer that goes with it maps bytes to ids 0..255.
    """

    shape: str
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SyntheticModel:
    """No model at all: an executor of known step time for tests and benchmarks (``synthetic:<key>=<value>,…``).

    Tokens are a fixed function of seed and position, so that every topology gives the same output.
    """

    step_ms: float = 0.0
    """Time that one stage computes for one iteration, milliseconds."""
    token_us: float = 0.0
    """Time that one stage computes for each token of the iteration, microseconds."""
    vocab_size: int = 260
    max_model_len: int = 8192
    num_layers: int = 12


ModelSource = HfFolder | GgufFile | RandomModel | SyntheticModel
