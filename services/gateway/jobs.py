"""From checked options and tokenized prompts to jobs: one for each sequence that the engine is to generate.

Candidates of a prompt differ in their seeds only. The one of sample 0 has the request's own seed, so that a choice does
not depend on how many were asked for. Where no seed is given, every prompt gets one of its own.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.errors import InvalidRequestError
from shared.messages import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.generation import GenerateOptions
    from shared.ids import RequestId
    from shared.messages import EngineInfo, TokenIds

__all__ = ["GenerateJob", "JobTerms", "Prompt", "build_jobs", "prompt_field", "sample_seed"]

_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a sequence goes on from."""

    token_ids: TokenIds
    text: str | None = None
    """As the client wrote it; None where it sent ids."""


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """A sequence that this engine can generate."""

    request_id: RequestId
    model: str
    """Whose token ids these are."""
    prompt_token_ids: TokenIds
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    """The request's own and, unless it ignores them, the model's."""
    received_ns: int
    """When the gateway received it, by its own clock."""
    num_prompt_logprobs: int | None = None
    grammar: str = ""
    traceparent: str = ""

    @property
    def needs_engine(self) -> bool:
        """Whether there is anything to compute."""
        return self.max_tokens > 0 or self.num_prompt_logprobs is not None


@dataclass(frozen=True, slots=True)
class JobTerms:
    """What the jobs of a request share beside the client's options."""

    request_id: RequestId
    engine: EngineInfo
    eos_token_ids: frozenset[int]
    default_max_tokens: int | None
    """None is all that the context and the engine's K/V slots have left."""
    received_ns: int
    echo: bool = False
    grammar: str = ""
    traceparent: str = ""
    """The request's span, where it is traced."""


def prompt_field(index: int, num_prompts: int) -> str:
    """Return what messages call a prompt."""
    return "prompt" if num_prompts == 1 else f"prompts[{index}]"


def sample_seed(seed: int, sample: int) -> int:
    """Return the seed of a candidate: that of the request itself, then SplitMix64's (Steele et al. 2014) from there."""
    if sample == 0:
        return seed
    mixed = (seed + sample * 0x9E3779B97F4A7C15) & _SEED_MASK
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _SEED_MASK
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _SEED_MASK
    return mixed ^ mixed >> 31


def build_jobs(prompts: Sequence[Prompt], options: GenerateOptions, terms: JobTerms) -> list[GenerateJob]:
    """Check prompts, whose ids the model knows, against the engine and the options, which `check_options` has passed.

    Returns:
        A job for each candidate: those of the first prompt come first, in the order of samples.

    Raises:
        InvalidRequestError: one of the prompts cannot be served; it says which.
    """
    jobs = []
    num_candidates = options.n if options.best_of is None else options.best_of
    stop_token_ids = frozenset(options.stop_token_ids)
    if not options.ignore_eos:
        # A tokenizer may name ids that the model cannot produce.
        stop_token_ids |= {token_id for token_id in terms.eos_token_ids if token_id < terms.engine.vocab_size}
    # Choosing the most likely takes knowing how likely they are.
    num_logprobs = 0 if options.num_logprobs is None and num_candidates > options.n else options.num_logprobs
    logit_bias = tuple(sorted(options.logit_bias.items()))
    for index, prompt in enumerate(prompts):
        max_tokens = _max_tokens(prompt, options, terms, prompt_field(index, len(prompts)))
        seed = secrets.randbits(64) if options.seed is None else options.seed
        scores_prompt = terms.echo and options.num_logprobs is not None and len(prompt.token_ids) > 1
        jobs += [
            GenerateJob(
                request_id=terms.request_id,
                model=terms.engine.model,
                prompt_token_ids=prompt.token_ids,
                max_tokens=max_tokens,
                sampling=SamplingParams(
                    temperature=options.temperature,
                    top_k=options.top_k,
                    top_p=options.top_p,
                    min_p=options.min_p,
                    seed=sample_seed(seed, sample),
                    repetition_penalty=options.repetition_penalty,
                    presence_penalty=options.presence_penalty,
                    frequency_penalty=options.frequency_penalty,
                    logit_bias=logit_bias,
                    min_tokens=options.min_tokens,
                    num_logprobs=num_logprobs,
                ),
                stop_token_ids=stop_token_ids,
                received_ns=terms.received_ns,
                num_prompt_logprobs=options.num_logprobs if scores_prompt else None,
                grammar=terms.grammar,
                traceparent=terms.traceparent,
            )
            for sample in range(num_candidates)
        ]
    return jobs


def _max_tokens(prompt: Prompt, options: GenerateOptions, terms: JobTerms, field: str) -> int:
    """Return how many tokens may be generated; raise where prompt and output do not fit."""
    engine, ids = terms.engine, prompt.token_ids
    num_prompt = len(ids)
    context = engine.max_model_len
    name = "the prompt" if field == "prompt" else field
    if num_prompt == 0:
        raise InvalidRequestError(f"{name} has no tokens; send at least one character or one token id", field=field)
    max_tokens = options.max_tokens
    longest = context if max_tokens == 0 else context - 1
    if num_prompt > longest:
        room = "" if max_tokens == 0 else ", to leave room for an output"
        raise InvalidRequestError(
            f"{name} has {num_prompt} tokens; with a context of {context} tokens it may have {longest}{room}; "
            "shorten it",
            field=field,
        )
    asked = f"max_tokens ({max_tokens})"
    if max_tokens is None:
        left = min(context, engine.num_slots) - num_prompt
        max_tokens = max(left, 1) if terms.default_max_tokens is None else terms.default_max_tokens
        asked = f"max_tokens ({max_tokens} by default)"
    total = num_prompt + max_tokens
    sum_ = f"{name.removeprefix('the ')} ({num_prompt} tokens) and {asked} add up to {total}"
    if total > context:
        raise InvalidRequestError(
            f"{sum_}, over the context of {context} tokens; ask for at most {context - num_prompt}, or shorten it",
            field="max_tokens",
        )
    if total > engine.num_slots:
        raise InvalidRequestError(
            f"{sum_}, over the engine's capacity of {engine.num_slots} K/V slots, so that it can never run; lower "
            "max_tokens, shorten the prompt, or have the engine started with more --kv-memory",
            field="max_tokens",
        )
    if options.min_tokens > max_tokens:
        raise InvalidRequestError(f"min_tokens is {options.min_tokens}; it may be at most {asked}", field="min_tokens")
    return max_tokens
