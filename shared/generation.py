"""What clients ask of a gateway and what they get back, as plain frozen data.

The vocabulary of the public API: ``shared.client`` speaks it to Python programs, ``shared.codec.generation`` translates
it, the gateway checks it. What is asked is as the client wrote it; nothing here knows which values are valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.messages import EngineInfo, EngineStatus, FinishReason

__all__ = ["ChatMessage", "Delta", "Finish", "GatewayStatus", "GenerateOptions", "ModelInfo"]


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
    """Same seed, same tokens; None lets the gateway choose."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the output, besides the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on past the model's own end-of-sequence ids."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    """"system", "user" or "assistant"."""
    content: str


@dataclass(frozen=True, slots=True)
class Finish:
    """How a request ended and what it took."""

    reason: FinishReason
    """STOP or LENGTH; a request that failed raises instead."""
    num_prompt_tokens: int
    num_output_tokens: int
    """The token that stopped the output counts."""
    queue_ms: float
    """From the gateway's receipt of the request to its first schedule."""
    prefill_ms: float
    """From its first schedule to its first token."""
    decode_ms: float
    """From its first token to its last."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one request's output."""

    text: str = ""
    """Text that has become complete; no character is ever cut."""
    token_ids: tuple[int, ...] = ()
    """The stop token included. Their text may come with a later delta."""
    finish: Finish | None = None
    """Set in the last delta only."""
    request_id: str = ""
    """Set in the first delta only."""


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
