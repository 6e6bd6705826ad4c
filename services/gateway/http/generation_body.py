"""What the bodies of both generating endpoints share, and what `GenerateOptions` it stands for.

The fields are OpenAI's and, beyond those, vLLM's, with the meanings and the defaults that they have there. Ranges are
checked by the gateway itself, for all its fronts; here are types, and the rules that only HTTP has.
"""

from typing import Annotated, Any, TypeVar

from pydantic import Field

from services.gateway.admission import MAX_CHOICES, MAX_TEMPERATURE
from services.gateway.http.errors import HttpError
from services.gateway.http.fields import (
    Body,
    Items,
    JsonSchemaOrText,
    Only,
    OnlyFalse,
    OnlyNull,
    OnlyTrue,
    Stop,
    TokenIds,
    limited,
)
from services.gateway.http.guidance_body import ResponseFormat, StructuredOutputs, guidance_of
from shared.generation import GenerateOptions, Guidance
from shared.sampling import MAX_PENALTY, MAX_REPETITION_PENALTY

__all__ = ["GenerationBody", "StreamOptions"]

_T = TypeVar("_T")


class StreamOptions(Body):
    """How to stream."""

    include_usage: bool | None = None
    """Send one more chunk at the end, without choices, that has the usage."""
    include_obfuscation: OnlyFalse = None
    continuous_usage_stats: OnlyFalse = None


class GenerationBody(Body):
    """Sampling, limits, output format and delivery."""

    model: str | None = None
    """The served model's name; may be left out, since there is one only."""
    max_tokens: int | None = limited(minimum=0)
    """Most output tokens."""
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    """Choices for each prompt; at most 128 in all."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = limited(minimum=0, maximum=MAX_TEMPERATURE)
    """0 is greedy; default 1."""
    top_p: float | None = limited(exclusiveMinimum=0, maximum=1)
    """Keep the smallest set of tokens with this much probability; default 1, which keeps all."""
    top_k: int | None = limited(minimum=-1)
    """Keep the k likeliest tokens; 0 or -1, the default, keeps all."""
    min_p: float | None = limited(minimum=0, maximum=1)
    """Keep tokens at least this times as likely as the likeliest one; default 0."""
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 64)
    """The same seed gives the same tokens. A negative one is taken as its 64 bits."""
    presence_penalty: float | None = limited(minimum=-MAX_PENALTY, maximum=MAX_PENALTY)
    frequency_penalty: float | None = limited(minimum=-MAX_PENALTY, maximum=MAX_PENALTY)
    repetition_penalty: float | None = limited(exclusiveMinimum=0, maximum=MAX_REPETITION_PENALTY)
    """Of tokens in prompt and output; default 1, which is none."""
    logit_bias: dict[str, float] | None = None
    """By token id, from -100 to 100; 100 forces it, -100 bars it."""
    stop: Stop = None
    """Texts that end the output and are not part of it."""
    stop_token_ids: TokenIds | None = None
    """Ids that end the output, besides the model's own."""
    ignore_eos: bool | None = None
    """Go on past the model's own end of text."""
    min_tokens: int | None = limited(minimum=0)
    """Nothing ends the output before it has so many tokens, the limit aside."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    timeout: float | None = limited(exclusiveMinimum=0)
    """Give up after so many seconds, with status 408."""
    return_token_ids: bool | None = None
    """Give each choice its ``token_ids``, and ``prompt_token_ids``."""
    user: str | None = None
    """Accepted and ignored."""

    skip_special_tokens: OnlyTrue = None
    spaces_between_special_tokens: OnlyTrue = None
    include_stop_str_in_output: OnlyFalse = None
    add_special_tokens: OnlyNull = None
    truncate_prompt_tokens: OnlyNull = None
    prompt_logprobs: OnlyNull = None
    allowed_token_ids: OnlyNull = None
    bad_words: Annotated[Any, Only([])] = None
    length_penalty: Annotated[Any, Only(1.0, 1)] = None
    use_beam_search: OnlyFalse = None
    priority: Annotated[Any, Only(0)] = None
    logits_processors: Annotated[Any, Only([])] = None
    return_tokens_as_token_ids: OnlyFalse = None
    request_id: OnlyNull = None
    guided_decoding_backend: OnlyNull = None
    guided_whitespace_pattern: OnlyNull = None

    @property
    def includes_usage(self) -> bool:
        """Whether a last chunk has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def guidance_field(self) -> str | None:
        """Which of the fields says what the output must match."""
        guidance = self._guidance()
        return guidance and guidance[0]

    def _guidance(self) -> tuple[str, Guidance] | None:
        return guidance_of(
            self.response_format,
            self.structured_outputs,
            StructuredOutputs(
                json=self.guided_json,
                regex=self.guided_regex,
                choice=self.guided_choice,
                grammar=self.guided_grammar,
            ),
        )

    def check_delivery(self) -> None:
        """Refuse options of a stream where none is asked for."""
        if self.stream_options is not None and not self.stream:
            raise HttpError(400, "stream_options is allowed only when stream is true", param="stream_options")

    def options(self, *, max_tokens: int | None, num_logprobs: int | None, best_of: int | None) -> GenerateOptions:
        """Return the options; absent ones have the gateway's defaults. Raises ``HttpError``."""
        defaults = GenerateOptions()
        guidance = self._guidance()
        return GenerateOptions(
            max_tokens=max_tokens,
            temperature=_or(self.temperature, defaults.temperature),
            top_k=0 if self.top_k in {None, -1} else _or(self.top_k, defaults.top_k),
            top_p=_or(self.top_p, defaults.top_p),
            min_p=_or(self.min_p, defaults.min_p),
            seed=None if self.seed is None else self.seed % (1 << 64),
            repetition_penalty=_or(self.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=_or(self.presence_penalty, defaults.presence_penalty),
            frequency_penalty=_or(self.frequency_penalty, defaults.frequency_penalty),
            logit_bias=_logit_bias(self.logit_bias or {}),
            stop=self.stop or (),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            min_tokens=self.min_tokens or 0,
            n=_or(self.n, defaults.n),
            best_of=best_of,
            num_logprobs=num_logprobs,
            guidance=guidance and guidance[1],
            timeout_s=self.timeout,
        )


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    for key in bias:
        if not key.removeprefix("-").isdecimal() or not key.isascii() or len(key) > 20:
            raise HttpError(400, f"logit_bias has {key[:40]!r} for a token id, which is no integer", param="logit_bias")
    by_id = {int(key): value for key, value in bias.items()}
    if len(by_id) < len(bias):
        raise HttpError(400, "logit_bias has the same token id twice", param="logit_bias")
    return by_id
