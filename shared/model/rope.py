"""Rotary position embeddings, as numbers: the frequencies of a model and the known ways to stretch its context.

Knows the formulas of the published scalings; not where their parameters were read, nor any tensor. No torch here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.errors import ModelError

__all__ = [
    "LinearRope",
    "Llama3Rope",
    "RopeFactors",
    "RopeScaling",
    "YarnRope",
    "attention_factor",
    "inverse_frequencies",
]


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Position interpolation: every frequency divided by ``factor`` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1: low frequencies divided by ``factor``, high ones kept, a smooth passage between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor or self.original_max_len < 1:
            raise ModelError("The model's llama3 RoPE scaling contradicts itself: fetch the model again.")


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (Peng et al. 2023): interpolation by frequency, and a scale on the attention logits."""

    factor: float
    original_max_len: int
    attention_factor: float
    """Multiplies cos and sin."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.original_max_len < 1:
            raise ModelError("The model's YaRN RoPE scaling has no original context length: fetch the model again.")

    @staticmethod
    def default_attention_factor(factor: float) -> float:
        """Return the paper's scale, 0.1 ln(factor) + 1."""
        return 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0


@dataclass(frozen=True, slots=True)
class RopeFactors:
    """One divisor per frequency, as a GGUF file's ``rope_freqs.weight`` gives them."""

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        if not all(0.0 < factor < math.inf for factor in self.factors):
            raise ModelError("The model's RoPE factors are not all above 0: fetch the model again.")


RopeScaling = LinearRope | Llama3Rope | YarnRope | RopeFactors


def attention_factor(scaling: RopeScaling | None) -> float:
    """Return what cos and sin are multiplied by."""
    return scaling.attention_factor if isinstance(scaling, YarnRope) else 1.0


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> list[float]:
    """Return the ``head_dim // 2`` angular frequencies, radians per position.

    Raises ModelError when the scaling does not belong to that head size.
    """
    plain = [theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]
    match scaling:
        case None:
            return plain
        case LinearRope(factor):
            return [frequency / factor for frequency in plain]
        case Llama3Rope():
            return [_llama3(frequency, scaling) for frequency in plain]
        case YarnRope():
            return _yarn(plain, theta, scaling)
        case RopeFactors(factors):
            if len(factors) != len(plain):
                raise ModelError(
                    f"The file gives {len(factors)} RoPE factors but a head has {len(plain)} frequencies: "
                    "the file is damaged, fetch it again."
                )
            return [frequency / factor for frequency, factor in zip(plain, factors, strict=True)]


def _llama3(frequency: float, rope: Llama3Rope) -> float:
    wavelength = 2 * math.pi / frequency
    if wavelength < rope.original_max_len / rope.high_freq_factor:
        return frequency
    if wavelength > rope.original_max_len / rope.low_freq_factor:
        return frequency / rope.factor
    smooth = (rope.original_max_len / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def _yarn(plain: list[float], theta: float, rope: YarnRope) -> list[float]:
    def dim_of(rotations: float) -> float:
        """Return the (fractional) index of the frequency that turns so often in the original context."""
        return len(plain) * math.log(rope.original_max_len / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(plain) - 1)
    width = high - low or 0.001
    ramp = [min(max((i - low) / width, 0.0), 1.0) for i in range(len(plain))]
    return [f / rope.factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]
