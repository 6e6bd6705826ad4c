"""What a client asked, checked: a refusal names field, value and limit.

Everything is checked here and in `jobs`, once: later code has no checks. Nothing is clamped: a request that cannot be
served as it was asked is refused. Does not know gRPC, nor where a request goes.
"""

from __future__ import annotations

import math
import re
import secrets
from typing import TYPE_CHECKING

from shared.errors import InvalidRequestError
from shared.ids import RequestId
from shared.sampling import (
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shared.generation import ChatMessage, GenerateOptions
    from shared.messages import EngineInfo

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "MAX_CHOICES",
    "ROLES",
    "check_messages",
    "check_num_messages",
    "check_num_prompts",
    "check_num_tool_calls",
    "check_options",
    "check_text",
    "check_vocabulary",
    "count_candidates",
    "num_utf8_bytes",
    "parse_request_id",
]

DEFAULT_MAX_TOKENS = 16
"""Of a prompt; a conversation may go on to the end of the context."""

MAX_CHOICES = 128
"""Of a request, those that ``best_of`` drops included."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Of turns; "developer" is taken as "system"."""

MAX_MESSAGES = 4096
"""Of a conversation: each takes the template's time, however short it is."""

MAX_REQUEST_ID_CHARACTERS = 128
MAX_STOP_TOKEN_IDS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_TEMPERATURE = 100.0
_MAX_TOP_K = (1 << 32) - 1
_SMALLEST_FLOAT32 = 2.0**-149
"""Less is zero, as numbers travel in the mesh."""
_MAX_SEED = (1 << 64) - 1

_MIN_TEXT_BYTES = 64 << 10
_MAX_TEXT_BYTES_PER_TOKEN = 32
"""Of a whole text; real ones have about 4. Beyond it a text cannot fit into the context: why tokenize it at all."""

_PRINTABLE_ASCII = re.compile(r"[\x20-\x7e]*")


def parse_request_id(text: str) -> RequestId:
    """Return the client's name for a request, or a new one where it gave none."""
    if len(text) > MAX_REQUEST_ID_CHARACTERS:
        raise InvalidRequestError(
            f"request_id has {len(text)} characters; at most {MAX_REQUEST_ID_CHARACTERS} are allowed",
            field="request_id",
        )
    if not _PRINTABLE_ASCII.fullmatch(text):
        raise InvalidRequestError(
            f"request_id {text!a} must be printable ASCII: logs and metadata carry nothing else", field="request_id"
        )
    return RequestId(text or secrets.token_hex(16))


def count_candidates(options: GenerateOptions, num_prompts: int) -> int:
    """Return how many sequences a request takes."""
    if num_prompts == 0:
        raise InvalidRequestError("prompts is empty; send at least one", field="prompts")
    if not 1 <= options.n <= MAX_CHOICES:
        raise InvalidRequestError(f"n is {options.n}; it must be between 1 and {MAX_CHOICES}", field="n")
    best_of = options.n if options.best_of is None else options.best_of
    if best_of < options.n:
        raise InvalidRequestError(f"best_of is {best_of}; it must be at least n, which is {options.n}", field="best_of")
    if best_of > options.n and options.max_tokens == 0:
        raise InvalidRequestError(f"best_of is {best_of} with max_tokens 0: no output is the best", field="best_of")
    total = num_prompts * best_of
    if total > MAX_CHOICES:
        name = "n" if options.best_of is None else "best_of"
        raise InvalidRequestError(
            f"prompts ({num_prompts}) times {name} ({best_of}) are {total} choices; at most {MAX_CHOICES} are allowed",
            field="prompts" if num_prompts > MAX_CHOICES else name,
        )
    return total


def check_num_prompts(num_prompts: int) -> None:
    """Refuse more prompts than a request may have, before each is looked at."""
    if num_prompts > MAX_CHOICES:
        raise InvalidRequestError(
            f"there are {num_prompts} prompts; at most {MAX_CHOICES} choices are allowed", field="prompts"
        )


def num_utf8_bytes(field: str, text: str) -> int:
    """Return how long a text is; refuse one that has no UTF-8 form."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{field} has a lone surrogate, which no UTF-8 text can have", field=field) from None


def check_text(field: str, num_bytes: int, engine: EngineInfo) -> None:
    """Refuse a text that is far beyond the context, before the work of tokenizing it."""
    limit = max(_MIN_TEXT_BYTES, engine.max_model_len * _MAX_TEXT_BYTES_PER_TOKEN)
    if num_bytes > limit:
        raise InvalidRequestError(
            f"{field} has {num_bytes} bytes; at most {limit} are allowed for a context of {engine.max_model_len} "
            "tokens; shorten it",
            field=field,
        )


def check_num_messages(num_messages: int) -> None:
    """Refuse more turns than a conversation may have, before each is looked at."""
    if num_messages > MAX_MESSAGES:
        raise InvalidRequestError(
            f"there are {num_messages} messages; at most {MAX_MESSAGES} are allowed", field="messages"
        )


def check_num_tool_calls(num_calls: int) -> None:
    """Refuse more calls of tools than a conversation may have, before each is looked at."""
    if num_calls > MAX_MESSAGES:
        raise InvalidRequestError(
            f"the messages have {num_calls} calls of tools; at most {MAX_MESSAGES} are allowed", field="messages"
        )


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Refuse a conversation without turns, with too many, or with a turn of nobody that templates know."""
    if not messages:
        raise InvalidRequestError(
            "messages is empty; send at least one, for example with role 'user'", field="messages"
        )
    check_num_messages(len(messages))
    check_num_tool_calls(sum(len(message.tool_calls) for message in messages))
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            shown = repr(message.role[:40]) if message.role else "empty"
            raise InvalidRequestError(
                f"messages[{index}].role is {shown}; send one of {', '.join(map(repr, ROLES))}",
                field=f"messages[{index}].role",
            )


def check_options(options: GenerateOptions, engine: EngineInfo, *, echo: bool = False) -> None:
    """Refuse options that no prompt could make valid."""
    if options.max_tokens is not None and options.max_tokens < (0 if echo else 1):
        raise InvalidRequestError(
            f"max_tokens is {options.max_tokens}; it must be at least 1 (leave it out for the default), or 0 with echo",
            field="max_tokens",
        )
    _check_range("temperature", options.temperature, 0, MAX_TEMPERATURE, "0 is greedy, the default is 1")
    _check_range("top_k", options.top_k, 0, _MAX_TOP_K, "0 keeps all tokens")
    _check_above_zero("top_p", options.top_p, 1, "1 keeps all tokens")
    _check_range("min_p", options.min_p, 0, 1, "0 keeps all tokens")
    _check_above_zero("repetition_penalty", options.repetition_penalty, MAX_REPETITION_PENALTY, "1 does nothing")
    _check_range("presence_penalty", options.presence_penalty, -MAX_PENALTY, MAX_PENALTY, "0 does nothing")
    _check_range("frequency_penalty", options.frequency_penalty, -MAX_PENALTY, MAX_PENALTY, "0 does nothing")
    if options.seed is not None:
        _check_range("seed", options.seed, 0, _MAX_SEED, "leave it out for a random one")
    if options.num_logprobs is not None:
        _check_range("num_logprobs", options.num_logprobs, 0, MAX_LOGPROBS, "leave it out for none")
    if options.min_tokens < 0:
        raise InvalidRequestError(f"min_tokens is {options.min_tokens}; it must be at least 0", field="min_tokens")
    if options.timeout_s is not None and not 0 < options.timeout_s < math.inf:  # false for nan, too
        raise InvalidRequestError(
            f"timeout_s is {options.timeout_s:g}; it must be above 0, in seconds; leave it out to wait for ever",
            field="timeout_s",
        )
    _check_logit_bias(options.logit_bias, engine)
    _check_stops(options.stop)
    if len(options.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            f"stop_token_ids has {len(options.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed",
            field="stop_token_ids",
        )
    check_vocabulary("stop_token_ids", options.stop_token_ids, engine)


def check_vocabulary(field: str, ids: Sequence[int], engine: EngineInfo) -> None:
    """Refuse ids that the model does not know."""
    if not ids or (min(ids) >= 0 and max(ids) < engine.vocab_size):
        return
    index, token_id = next((i, t) for i, t in enumerate(ids) if not 0 <= t < engine.vocab_size)
    raise InvalidRequestError(f"{field}[{index}] is {token_id}; {_vocabulary(engine)}", field=field)


def _check_logit_bias(logit_bias: Mapping[int, float], engine: EngineInfo) -> None:
    if len(logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(
            f"logit_bias has {len(logit_bias)} entries; at most {MAX_LOGIT_BIASES} are allowed", field="logit_bias"
        )
    for token_id, bias in logit_bias.items():
        if not 0 <= token_id < engine.vocab_size:
            raise InvalidRequestError(
                f"logit_bias is for token id {token_id}; {_vocabulary(engine)}", field="logit_bias"
            )
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:  # false for nan, too
            raise InvalidRequestError(
                f"logit_bias[{token_id}] is {bias:g}; it must be between {-MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}",
                field="logit_bias",
            )


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop has {len(stops)} texts; at most {MAX_STOP_STRINGS} are allowed", field="stop")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequestError(
                f"stop[{index}] has {len(stop)} characters; it must have from 1 to {MAX_STOP_CHARACTERS}", field="stop"
            )
        num_utf8_bytes(f"stop[{index}]", stop)


def _vocabulary(engine: EngineInfo) -> str:
    return f"the model knows token ids from 0 to {engine.vocab_size - 1} only"


def _check_range(field: str, value: float, low: float, high: float, hint: str) -> None:
    if not low <= value <= high:  # false for nan, too
        shown, lowest, highest = map(_shown, (value, low, high))
        raise InvalidRequestError(f"{field} is {shown}; it must be between {lowest} and {highest}; {hint}", field=field)


def _check_above_zero(field: str, value: float, high: float, hint: str) -> None:
    if not _SMALLEST_FLOAT32 <= value <= high:  # false for nan, too
        raise InvalidRequestError(f"{field} is {value:g}; it must be above 0 and at most {high:g}; {hint}", field=field)


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
