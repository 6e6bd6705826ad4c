"""What clients ask of a gateway and what they get back, as plain frozen data.

The vocabulary of the public API: ``shared.client`` speaks it to Python programs, ``shared.codec.generation`` translates
it, the gateway checks it. What is asked is as the client wrote it; nothing here knows which values are valid.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shared.messages import EngineInfo, EngineStatus, FinishReason

__all__ = [
    "ChatMessage",
    "ChatRequest",
    "Delta",
    "Finish",
    "GatewayStatus",
    "GenerateOptions",
    "GenerateRequest",
    "Guidance",
    "GuidanceKind",
    "ModelInfo",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "ToolMode",
    "TopLogprob",
    "Usage",
]


class GuidanceKind(enum.Enum):
    """How `Guidance` is written; values are the fields of the contract."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICES = "choices"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Guidance:
    """What the output must match."""

    kind: GuidanceKind
    text: str = ""
    """The schema as JSON text, the regular expression, or the grammar in Lark's notation."""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """How to generate; the defaults are those of the contract."""

    max_tokens: int | None = None
    """Most output tokens; None: 16 for a prompt, what is left of the context for a conversation."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """Same seed, same tokens; None lets the gateway choose. Each choice draws from a seed of its own made of it."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """What is added to the logits of single tokens, by token id."""
    stop: tuple[str, ...] = ()
    """Texts that end the output and are not part of it. The one that is complete first counts; of several that are
    complete with the same character, the longest."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the output, besides the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on past the model's own end-of-sequence ids."""
    min_tokens: int = 0
    """Nothing ends the output before it has so many tokens, max_tokens aside."""
    n: int = 1
    """Outputs for each prompt."""
    best_of: int | None = None
    """Generate so many and return the ``n`` most likely ones, by mean log probability of their tokens."""
    num_logprobs: int | None = None
    """Return log probabilities of output tokens (with echo, of prompt tokens, too), and so many of the most likely."""
    guidance: Guidance | None = None
    timeout_s: float | None = None
    """Give up after so long."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Prompts to continue."""

    prompts: Sequence[str | Sequence[int]]
    """Texts or token ids."""
    options: GenerateOptions = field(default_factory=GenerateOptions)
    echo: bool = False
    """Begin each choice with its prompt."""
    request_id: str = ""
    """Name for logs and traces; empty lets the gateway choose."""
    return_prompt_token_ids: bool = False
    """Tell in the first delta what the prompts are as token ids."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by the model."""

    id: str
    name: str
    arguments: str
    """A JSON object, as text."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    """"system", "user", "assistant" or "tool"."""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Of an assistant's turn."""
    tool_call_id: str = ""
    """Of a tool's turn: which call this answers."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call."""

    name: str
    description: str = ""
    parameters: str = ""
    """JSON schema of its arguments, as text; empty: no arguments."""


class ToolMode(enum.Enum):
    """Whether tools are called; values are the fields of the contract."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "name"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools are called."""

    mode: ToolMode = ToolMode.AUTO
    name: str = ""
    """With NAMED."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation to answer."""

    messages: Sequence[ChatMessage]
    options: GenerateOptions = field(default_factory=GenerateOptions)
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    continue_final_message: bool = False
    """The output goes on with the last message, which is the assistant's, rather than answering it."""
    request_id: str = ""
    parallel_tool_calls: bool = True
    """False: an output has one call at most, and ends with it whatever else would keep it going."""
    return_prompt_token_ids: bool = False
    """Tell in the first delta what the conversation is as token ids."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request."""

    num_prompt_tokens: int
    """Of all prompts, each counted once."""
    num_output_tokens: int
    """Of all choices, those that best_of dropped included; a token that stopped an output counts."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class Finish:
    """How a choice ended and what it took."""

    reason: FinishReason
    """STOP, LENGTH or TOOL_CALLS; a request that failed raises instead."""
    num_output_tokens: int
    """The token that stopped the output counts."""
    queue_ms: float
    """From the gateway's receipt of the request to its first schedule."""
    prefill_ms: float
    """From its first schedule to its first token."""
    decode_ms: float
    """From its first token to its last."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    stop: str | int | None = None
    """What stopped it: the stop string, or the id of the token."""


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """A token that might have been."""

    token_id: int
    token: str
    """U+FFFD for bytes that are no characters by themselves."""
    token_bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and how likely it was, by the raw logits."""

    token_id: int
    token: str
    """U+FFFD for bytes that are no characters by themselves."""
    token_bytes: bytes
    """Its part of the text: those of all tokens, joined, are the text. Empty for a token that is not shown."""
    logprob: float | None
    """None for the first token of a prompt, which nothing predicts."""
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call."""

    index: int
    """Which call of the choice."""
    id: str = ""
    """Set in the first piece only, and so is the name."""
    name: str = ""
    arguments: str = ""
    """Goes on from the pieces before."""


class Delta(NamedTuple):
    """News of one choice: a tuple, since there is one for every token."""

    text: str = ""
    """Text that has become complete; no character is ever cut, and nothing of a stop string is shown."""
    token_ids: tuple[int, ...] = ()
    """The tokens of ``text``, the stop token included."""
    finish: Finish | None = None
    """Set in the last delta of a choice."""
    request_id: str = ""
    """Set in the first delta of the request only, which says that it was accepted."""
    choice: int = 0
    """Prompt times n plus sample."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of ``token_ids``, where asked for."""
    is_prompt: bool = False
    """Text, tokens and log probabilities are those of the prompt (echo)."""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    usage: Usage | None = None
    """Set in the last delta of the request."""
    prompt_token_ids: tuple[tuple[int, ...], ...] = ()
    """Of each prompt; set in the first delta of the request only, where asked for."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that is served, and its limits."""

    engine: EngineInfo
    eos_token_ids: tuple[int, ...]
    """Ids that end the output unless ``ignore_eos`` is set."""
    has_chat_template: bool
    """False: conversations are refused, prompts work."""


@dataclass(frozen=True, slots=True)
class GatewayStatus:
    """The engine behind a gateway, and the gateway's own load."""

    engine: EngineStatus
    num_gateway_requests: int
    """Requests that this gateway is serving now."""
