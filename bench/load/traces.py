"""What is asked of a server: prompts as token ids and lengths of outputs, drawn from a seed alone.

Knows the distributions; knows neither when requests are sent nor how a prompt is written in a request. Python's own
generator draws everything, so a trace is the same on every machine.
"""

from __future__ import annotations

import enum
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from shared.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NUM_RESERVED_IDS", "LengthRange", "TraceConfig", "TraceName", "TraceRequest", "make_trace"]

SHAREGPT_MEAN_INPUT_TOKENS = 161.31
SHAREGPT_MEAN_OUTPUT_TOKENS = 337.99
"""Means of ShareGPT as vLLM's paper tells them (SOSP '23, figure 11)."""
SHAREGPT_SIGMA = 1.0
"""Standard deviation of the logarithm of a length: before the ends are cut off, one length of 100 is more than 10 times
the median. A choice of ours: the paper shows heavy tails and gives no parameter of them."""

NUM_RESERVED_IDS = 100
"""Ids that no prompt has: many vocabularies have their special tokens there."""


class TraceName(enum.StrEnum):
    """Which distribution of lengths and prompts."""

    ORCA = "orca"
    """Lengths uniform, prompts and outputs (ORCA, section 6.2)."""
    SHAREGPT_LIKE = "sharegpt-like"
    """Lengths log-normal between bounds, with the means of ShareGPT."""
    SHARED_PREFIX = "shared-prefix"
    """Each prompt begins with one of a few prefixes; what follows is its own."""
    FIXED = "fixed"
    """Every request of the same size."""


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Lengths in tokens, both ends included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        """Check the order."""
        if not 1 <= self.low <= self.high:
            raise ConfigError(f"lengths from {self.low} to {self.high} tokens: write LOW-HIGH, both at least 1")

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


_DEFAULTS = {
    TraceName.ORCA: (LengthRange(32, 512), LengthRange(1, 128)),
    TraceName.SHAREGPT_LIKE: (LengthRange(4, 1024), LengthRange(4, 1024)),
    TraceName.SHARED_PREFIX: (LengthRange(32, 128), LengthRange(1, 128)),
    TraceName.FIXED: (LengthRange(128, 128), LengthRange(128, 128)),
}


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """One trace: the same configuration gives the same requests."""

    name: TraceName
    num_requests: int
    seed: int
    input_len: LengthRange
    """Of prompts; in ``shared-prefix`` of what follows the prefix."""
    output_len: LengthRange
    prefix_len: int = 256
    """Tokens of each prefix of ``shared-prefix``."""
    num_prefixes: int = 4
    """Different prefixes of ``shared-prefix``, each as likely as another."""

    def __post_init__(self) -> None:
        """Check what belongs together."""
        if min(self.num_requests, self.prefix_len, self.num_prefixes) < 1:
            raise ConfigError("a trace has at least one request, one prefix, and one token in each prefix")
        if self.name is TraceName.FIXED:
            for what, lengths in (("input", self.input_len), ("output", self.output_len)):
                if lengths.low != lengths.high:
                    raise ConfigError(f"the {what} length of the trace fixed is one number, not {lengths}")

    @classmethod
    def of(
        cls,
        name: TraceName,
        *,
        num_requests: int,
        seed: int = 0,
        input_len: LengthRange | None = None,
        output_len: LengthRange | None = None,
        prefix_len: int = 256,
        num_prefixes: int = 4,
    ) -> Self:
        """Return a trace with the lengths that are its own where none are given."""
        default_input, default_output = _DEFAULTS[name]
        return cls(
            name,
            num_requests,
            seed,
            input_len or default_input,
            output_len or default_output,
            prefix_len,
            num_prefixes,
        )

    @property
    def max_tokens(self) -> int:
        """Most tokens that a request may take, prompt and output together."""
        prefix = self.prefix_len if self.name is TraceName.SHARED_PREFIX else 0
        return prefix + self.input_len.high + self.output_len.high


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request."""

    prompt: tuple[int, ...]
    """Token ids."""
    max_tokens: int
    """Output tokens to ask for."""


def make_trace(config: TraceConfig, *, vocab_size: int) -> list[TraceRequest]:
    """Draw the requests of a trace; ids are uniform over the vocabulary but for its first 100.

    Raises:
        ConfigError: the vocabulary is empty, or the mean of ``sharegpt-like`` is not within the given lengths.
    """
    if vocab_size < 1:
        raise ConfigError(f"a vocabulary of {vocab_size} tokens: it has at least one")
    draw = _Draw(random.Random(config.seed), vocab_size)
    match config.name:
        case TraceName.SHAREGPT_LIKE:
            lengths = _sharegpt_lengths(draw.rng, config)
        case _:
            lengths = _uniform_lengths(draw.rng, config)
    prefixes: list[tuple[int, ...]] = []
    if config.name is TraceName.SHARED_PREFIX:
        prefixes = [draw.ids(config.prefix_len) for _ in range(config.num_prefixes)]
    requests = []
    for _ in range(config.num_requests):
        prefix = draw.rng.choice(prefixes) if prefixes else ()
        # In this order, so that ``orca`` draws what other implementations of it with the same generator do.
        prompt = prefix + draw.ids(next(lengths))
        requests.append(TraceRequest(prompt, next(lengths)))
    return requests


@dataclass(frozen=True, slots=True)
class _Draw:
    rng: random.Random
    vocab_size: int

    def ids(self, length: int) -> tuple[int, ...]:
        low = NUM_RESERVED_IDS if self.vocab_size > 2 * NUM_RESERVED_IDS else 0
        return tuple(self.rng.randrange(low, self.vocab_size) for _ in range(length))


def _uniform_lengths(rng: random.Random, config: TraceConfig) -> Iterator[int]:
    """Give a prompt's length, then an output's, and so on."""
    while True:
        yield rng.randint(config.input_len.low, config.input_len.high)
        yield rng.randint(config.output_len.low, config.output_len.high)


def _sharegpt_lengths(rng: random.Random, config: TraceConfig) -> Iterator[int]:
    prompts = _LogNormal.with_mean(SHAREGPT_MEAN_INPUT_TOKENS, config.input_len)
    outputs = _LogNormal.with_mean(SHAREGPT_MEAN_OUTPUT_TOKENS, config.output_len)
    while True:
        yield prompts.draw(rng)
        yield outputs.draw(rng)


@dataclass(frozen=True, slots=True)
class _LogNormal:
    """A log-normal distribution of which what is outside of the bounds is cut off."""

    mu: float
    bounds: LengthRange

    @classmethod
    def with_mean(cls, mean: float, bounds: LengthRange) -> Self:
        """Return the one whose mean, after the cut, is ``mean``: by bisection, for the mean grows with ``mu``."""
        low, high = -20.0, 20.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if cls(middle, bounds).mean < mean else (low, middle)
        found = cls(low, bounds)
        if not math.isclose(found.mean, mean, rel_tol=1e-3):
            raise ConfigError(
                f"the trace sharegpt-like has lengths of {mean:g} tokens in the mean, which bounds of {bounds} do not "
                "allow: widen --input-len or --output-len"
            )
        return found

    @property
    def mean(self) -> float:
        """Mean between the bounds."""
        sigma = SHAREGPT_SIGMA
        low, high = ((math.log(end) - self.mu) / sigma for end in (self.bounds.low, self.bounds.high))
        mass = _normal_cdf(high) - _normal_cdf(low)
        if mass < 1e-12:  # all of it is beyond one of the ends
            return float(self.bounds.high if self.mu > math.log(self.bounds.high) else self.bounds.low)
        shifted = _normal_cdf(high - sigma) - _normal_cdf(low - sigma)
        return math.exp(self.mu + sigma**2 / 2) * shifted / mass

    def draw(self, rng: random.Random) -> int:
        while True:
            length = rng.lognormvariate(self.mu, SHAREGPT_SIGMA)
            if self.bounds.low <= length <= self.bounds.high:
                return round(length)


def _normal_cdf(value: float) -> float:
    return (1 + math.erf(value / math.sqrt(2))) / 2
