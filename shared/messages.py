"""What the services say to each other, as plain frozen data.

This module knows neither protobuf nor any service; ``shared.codec`` translates. Token ids are kept in ``array('I')``
(4 bytes each): ten thousand waiting prompts must not fill a small scheduler's memory with Python integers.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from shared.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shared.ids import BlockId, Epoch, Handle, RequestId, Row, StepId

__all__ = [
    "Cancel",
    "Ended",
    "EngineInfo",
    "EngineStatus",
    "FinishReason",
    "Hello",
    "JoinRequest",
    "Joined",
    "Loading",
    "NewSequence",
    "Registration",
    "SamplingParams",
    "SessionEvents",
    "StepPlan",
    "StepResult",
    "StepTiming",
    "Submit",
    "TokenIds",
    "WorkerStatus",
    "token_ids",
]

TokenIds: TypeAlias = "array[int]"
"""Token ids as ``array('I')``."""


def token_ids(ids: Iterable[int] = ()) -> TokenIds:
    """Build a ``TokenIds`` from integers of at least 0 and below 2**32."""
    return array("I", ids)


class FinishReason(enum.Enum):
    """Why a request ended; values are those of the contracts."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    ERROR = 4
    TOOL_CALLS = 5
    """The model called tools; the gateway alone can tell."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen. Valid by construction: the gateway checks ranges before it builds one."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Randomness is a function of the seed and the token's position alone; 64 bits, unsigned."""
    repetition_penalty: float = 1.0
    """Of prompt and output (CTRL, Keskar et al. 2019): positive logits are divided by it, negative ones multiplied."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that the output has."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token for each time that the output has it."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit); each id once."""
    min_tokens: int = 0
    """No token that ends the output is sampled before it has so many."""
    num_logprobs: int | None = None
    """Return the log probability of each output token and of so many of the most likely ones; None returns none."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was, by the raw logits: before temperature, penalties, bias and masks. Always finite."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log probability) of the most likely tokens, the most likely first."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of a piece of a prompt."""

    first_position: int
    """Place in the prompt of the first token; at least 1, since nothing predicts the first one."""
    tokens: tuple[TokenLogprobs, ...]


# --- gateway <-> scheduler --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a session."""

    gateway_id: str


@dataclass(frozen=True, slots=True)
class Submit:
    """A request for the scheduler's pool."""

    handle: Handle
    request_id: RequestId
    prompt_token_ids: TokenIds
    max_tokens: int
    """Output tokens at most, those of ``output_token_ids`` included."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()
    output_token_ids: TokenIds = field(default_factory=token_ids)
    """Tokens that the client has already, when a request is submitted again."""
    num_prompt_logprobs: int | None = None
    """Return the log probabilities of the prompt's tokens and of so many of the most likely ones; ``max_tokens`` may be
    0 then."""
    grammar: str = ""
    """What the output must match, in the guidance library's own form; empty: anything."""
    traceparent: str = ""
    """W3C trace context of the span that this is part of; empty where the request is not traced."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for this request any more."""

    handle: Handle


@dataclass(frozen=True, slots=True)
class Ended:
    """A request left the pool."""

    handle: Handle
    reason: FinishReason
    error_code: StatusCode = StatusCode.OK
    error_message: str = ""
    queue_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine is, constant for an epoch."""

    model: str
    max_model_len: int
    vocab_size: int
    num_slots: int
    block_size: int
    num_stages: int
    tp_size: int
    dtype: str


@dataclass(frozen=True, slots=True)
class SessionEvents:
    """All that happened to one gateway's requests since its last message; one entry of the columns for each token."""

    token_handles: list[Handle] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    engine_ready: EngineInfo | None = None
    engine_lost: bool = False
    token_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By index into the columns, rising."""
    prompt_logprobs: list[tuple[Handle, PromptLogprobs]] = field(default_factory=list)
    """A place may come again after a recovery."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One rank as the scheduler sees it."""

    stage: int
    tp_rank: int
    address: str
    state: str
    """"missing", "registered", "loading", "ready" or "failed"."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot of the engine for people and probes."""

    ready: bool
    reason: str
    epoch: int
    info: EngineInfo | None
    workers: tuple[WorkerStatus, ...]
    num_running: int = 0
    num_waiting: int = 0
    num_in_flight_steps: int = 0
    num_used_slots: int = 0
    num_cached_slots: int = 0
    num_preempted: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_broken_invariants: int = 0
    num_steps: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    last_batch_size: int = 0
    last_batch_tokens: int = 0


# --- scheduler <-> workers --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Registration:
    """A worker's claim to a rank."""

    stage: int
    tp_rank: int
    address: str
    rendezvous_address: str
    """Where world rank 0 serves the rendezvous store; empty on the other ranks."""
    device: str


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """What a worker must know to take its place in an epoch."""

    epoch: Epoch
    stage: int
    tp_rank: int
    num_stages: int
    tp_size: int
    rendezvous_address: str
    model: str
    dtype: str
    block_size: int
    kv_memory_bytes: int
    max_model_len: int
    """0 takes the model's own limit."""
    next_stage_address: str
    """Leader of the next stage; empty on the last stage and on ranks that lead none."""
    tp_addresses: tuple[str, ...]
    """The other ranks of this stage; empty on ranks that lead none."""
    collective_timeout_s: int
    workers_append_tokens: bool = False
    """Every rank appends the tokens that it samples to its own tables; only an engine of one stage can do that."""


@dataclass(frozen=True, slots=True)
class Loading:
    """A step on the way to ``Joined``."""

    phase: str
    """"weights", "process_group", "kv_cache" or "warm_up"."""
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Joined:
    """The capacity of a rank."""

    num_blocks: int
    max_model_len: int
    vocab_size: int
    dtype: str
    weights_bytes: int
    kv_bytes_per_block: int


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that the workers do not know yet, in full."""

    row: Row
    request_id: RequestId
    token_ids: TokenIds
    """Prompt, and output so far when it is recomputed."""
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    """All ids that end the output."""
    num_prompt_logprobs: int | None = None
    grammar: str = ""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration: ORCA's control message (§4.1) as a diff to what the workers know. Columns are in batch order."""

    epoch: Epoch
    step_id: StepId
    rows: list[Row]
    num_computed_tokens: list[int]
    """Position of each sequence's first token of this iteration."""
    num_tokens: list[int]
    samples: list[bool]
    """Whether a token is sampled after each sequence's last token of this iteration."""
    num_appended_tokens: list[int]
    appended_token_ids: list[int]
    num_new_blocks: list[int]
    new_block_ids: list[BlockId]
    new_sequences: list[NewSequence]
    """To learn before the columns are read."""
    released_rows: list[Row]
    """To forget before anything else."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came out of one iteration."""

    epoch: Epoch
    step_id: StepId
    token_ids: list[int]
    """One for each sequence of the plan that samples, in batch order."""
    invalid: list[int] = field(default_factory=list)
    """Indices into ``token_ids`` whose logits were not finite, or whose grammar failed."""
    compute_ns: int = 0
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By index into ``token_ids``, rising."""
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    """By index into the plan's columns."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """When a step passed through one rank; nanoseconds of the host's monotonic clock."""

    step_id: StepId
    received_ns: int
    started_ns: int
    ended_ns: int
    num_sequences: int
    num_tokens: int
    num_decode_tokens: int = 0
    """Of these, tokens of sequences that computed one; the others are of prompts (prefill)."""
