"""From what a client asked to a job that is valid by construction, or a refusal that names field, value and limit.

Everything is checked here, once: later code has no checks. Nothing is clamped: a request that cannot be served as it
was asked is refused. Does not know gRPC, nor where a request goes.

Rules that are not the contract's own: an empty prompt is refused only if it tokenizes to nothing (a model whose
tokenizer begins every text with a token generates from that one); prompt and ``max_tokens`` together must fit into the
context and into the engine's K/V slots.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.errors import InvalidRequestError
from shared.ids import RequestId
from shared.messages import SamplingParams, token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.generation import ChatMessage, GenerateOptions
    from shared.messages import EngineInfo, TokenIds

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "GenerateJob",
    "build_job",
    "check_options",
    "check_text",
    "check_vocabulary",
    "conversation_text_bytes",
    "parse_request_id",
]

DEFAULT_MAX_TOKENS = 16
"""Of a prompt; a conversation may go on to the end of the context."""

MAX_REQUEST_ID_CHARACTERS = 128
MAX_STOP_TOKEN_IDS = 1024
MAX_TEMPERATURE = 100.0
_MAX_TOP_K = (1 << 32) - 1
_MAX_SEED = (1 << 64) - 1

_MIN_TEXT_BYTES = 64 << 10
_MAX_TEXT_BYTES_PER_TOKEN = 32
"""Of a whole text; real ones have about 4. Beyond it a text cannot fit into the context: why tokenize it at all."""

_PRINTABLE_ASCII = re.compile(r"[\x20-\x7e]*")


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """A request that this engine can serve."""

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


def parse_request_id(text: str) -> RequestId:
    """Return the client's name for a request, or a new one where it gave none."""
    if len(text) > MAX_REQUEST_ID_CHARACTERS:
        raise InvalidRequestError(
            f"request_id has {len(text)} characters; at most {MAX_REQUEST_ID_CHARACTERS} are allowed"
        )
    if not _PRINTABLE_ASCII.fullmatch(text):
        raise InvalidRequestError(f"request_id {text!a} must be printable ASCII: logs and metadata carry nothing else")
    return RequestId(text or secrets.token_hex(16))


def check_text(field: str, num_bytes: int, engine: EngineInfo) -> None:
    """Refuse a text that is far beyond the context, before the work of tokenizing it."""
    limit = max(_MIN_TEXT_BYTES, engine.max_model_len * _MAX_TEXT_BYTES_PER_TOKEN)
    if num_bytes > limit:
        raise InvalidRequestError(
            f"{field} has {num_bytes} bytes; at most {limit} are allowed for a context of {engine.max_model_len} "
            "tokens; shorten it"
        )


def conversation_text_bytes(messages: Sequence[ChatMessage]) -> int:
    """Size of a conversation as text. Raises ``InvalidRequestError`` where there is none or a turn has no role."""
    if not messages:
        raise InvalidRequestError("messages is empty; send at least one, for example with role 'user'")
    for index, message in enumerate(messages):
        if not message.role:
            raise InvalidRequestError(f"messages[{index}].role is empty; send 'system', 'user' or 'assistant'")
    return sum(len(message.role.encode()) + len(message.content.encode()) for message in messages)


def check_options(options: GenerateOptions, engine: EngineInfo) -> None:
    """Refuse options that no prompt could make valid."""
    if options.max_tokens is not None and options.max_tokens < 1:
        raise InvalidRequestError(
            f"max_tokens is {options.max_tokens}; it must be at least 1 (leave it out for the default)"
        )
    _check_range("temperature", options.temperature, 0, MAX_TEMPERATURE, "0 is greedy, the default is 1")
    _check_range("top_k", options.top_k, 0, _MAX_TOP_K, "0 keeps all tokens")
    if not 0 < options.top_p <= 1:  # false for nan, too
        raise InvalidRequestError(
            f"top_p is {options.top_p:g}; it must be above 0 and at most 1, which keeps all tokens"
        )
    _check_range("min_p", options.min_p, 0, 1, "0 keeps all tokens")
    if options.seed is not None:
        _check_range("seed", options.seed, 0, _MAX_SEED, "leave it out for a random one")
    if len(options.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            f"stop_token_ids has {len(options.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed"
        )
    check_vocabulary("stop_token_ids", options.stop_token_ids, engine)


def build_job(
    request_id: RequestId,
    prompt_ids: Sequence[int],
    options: GenerateOptions,
    engine: EngineInfo,
    *,
    eos_token_ids: frozenset[int],
    default_max_tokens: int | None,
    received_ns: int,
) -> GenerateJob:
    """Check a tokenized prompt against the engine and the options, which `check_options` has passed.

    ``default_max_tokens`` None is all that the context and the engine's K/V slots have left.
    """
    num_prompt = len(prompt_ids)
    context = engine.max_model_len
    if num_prompt == 0:
        raise InvalidRequestError("the prompt has no tokens; send at least one character or one token id")
    check_vocabulary("prompt", prompt_ids, engine)
    if num_prompt > context - 1:
        raise InvalidRequestError(
            f"the prompt has {num_prompt} tokens; with a context of {context} tokens it may have {context - 1}, "
            "to leave room for an output; shorten it"
        )
    max_tokens = options.max_tokens
    asked = f"max_tokens ({max_tokens})"
    if max_tokens is None:
        left = min(context, engine.num_slots) - num_prompt
        max_tokens = max(left, 1) if default_max_tokens is None else default_max_tokens
        asked = f"max_tokens ({max_tokens} by default)"
    total = num_prompt + max_tokens
    sum_ = f"prompt ({num_prompt} tokens) and {asked} add up to {total}"
    if total > context:
        raise InvalidRequestError(
            f"{sum_}, over the context of {context} tokens; ask for at most {context - num_prompt}, or shorten it"
        )
    if total > engine.num_slots:
        raise InvalidRequestError(
            f"{sum_}, over the engine's capacity of {engine.num_slots} K/V slots, so that it can never run; lower "
            "max_tokens, shorten the prompt, or have the engine started with more --kv-memory"
        )
    return GenerateJob(
        request_id=request_id,
        model=engine.model,
        prompt_token_ids=token_ids(prompt_ids),
        max_tokens=max_tokens,
        sampling=SamplingParams(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=secrets.randbits(64) if options.seed is None else options.seed,
        ),
        stop_token_ids=frozenset(options.stop_token_ids) | (frozenset() if options.ignore_eos else eos_token_ids),
        received_ns=received_ns,
    )


def _check_range(field: str, value: float, low: float, high: float, hint: str) -> None:
    if not low <= value <= high:  # false for nan, too
        raise InvalidRequestError(f"{field} is {value:g}; it must be between {low} and {high:g}; {hint}")


def check_vocabulary(field: str, ids: Sequence[int], engine: EngineInfo) -> None:
    """Refuse ids that the model does not know."""
    if not ids or (min(ids) >= 0 and max(ids) < engine.vocab_size):
        return
    index, token_id = next((i, t) for i, t in enumerate(ids) if not 0 <= t < engine.vocab_size)
    raise InvalidRequestError(
        f"{field}[{index}] is {token_id}; the model knows token ids from 0 to {engine.vocab_size - 1} only"
    )
