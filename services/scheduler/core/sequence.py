"""A sequence: the token state of one request, and the states it passes through.

::

    WAITING ──▶ RUNNING ◀──▶ READY        RUNNING: in one iteration in flight, or in several when running ahead
       ▲           │           │          READY:   between two iterations (ORCA's "increment")
       └───────────┴───────────┤
     preempted, engine lost    ▼
                           FINISHED       and from everywhere, by cancellation

ORCA's "initiation" is WAITING: never scheduled since it (re)entered the queue. There is no phase of prefill or decode:
a sequence has tokens, and some of them have been computed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.scheduler.core.prefixes import EMPTY_PREFIX, PrefixName

if TYPE_CHECKING:
    from collections.abc import Hashable

    from shared.ids import BlockId, RequestId, Row
    from shared.messages import FinishReason, SamplingParams, TokenIds

__all__ = ["RequestKey", "Sequence", "Status"]

RequestKey = tuple["Hashable", int]
"""Who asked: (session, handle). Opaque to the core."""


class Status(enum.Enum):
    """Where a sequence is."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    READY = enum.auto()
    FINISHED = enum.auto()


_TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.READY, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.RUNNING, Status.READY, Status.WAITING, Status.FINISHED}),
    Status.READY: frozenset({Status.RUNNING, Status.WAITING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the pool. Mutated by the core alone."""

    key: RequestKey
    request_id: RequestId
    arrival: int
    """Position in the order of arrival; never changes."""
    token_ids: TokenIds
    """Prompt, then output."""
    num_prompt_tokens: int
    max_tokens: int
    """Output tokens at most."""
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    arrived_ns: int
    num_prompt_logprobs: int | None = None
    """Its prompt is scored, hence computed in full."""
    grammar: str = ""
    traceparent: str = ""
    """For the workers to tell; means nothing here."""
    status: Status = Status.WAITING
    row: Row | None = None
    """Row of the workers' tables; None while the workers do not know the sequence."""
    block_ids: list[BlockId] = field(default_factory=list)
    num_computed_tokens: int = 0
    """Tokens whose K/V is there, or will be once the iterations in flight are done."""
    num_pending_tokens: int = 0
    """Tokens that iterations in flight will sample; their K/V positions count already."""
    num_in_flight: int = 0
    """Iterations in flight that it is in."""
    num_known_tokens: int = 0
    """Tokens that the workers have been told."""
    num_known_blocks: int = 0
    """Blocks that the workers have been told."""
    prefix_name: PrefixName = EMPTY_PREFIX
    num_registered_blocks: int = 0
    """Full blocks at its beginning that the prefix cache knows, named together by ``prefix_name``."""
    incarnation: int = 0
    """Grows whenever it goes back to waiting: results of an earlier incarnation are void."""
    num_iterations: int = 0
    """Iterations it was scheduled in since it was last admitted."""
    num_preemptions: int = 0
    num_losses: int = 0
    """Epochs that ended while it was in flight, since its last token."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache when it was first admitted."""
    finish_reason: FinishReason | None = None
    scheduled_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that an iteration could compute next, those that are still in flight included; 1 when decoding."""
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def max_slots(self) -> int:
        """K/V slots it can ever need: prompt and output (``max_tokens`` in the paper's Algorithm 1)."""
        return self.num_prompt_tokens + self.max_tokens

    def move_to(self, status: Status) -> None:
        """Change state; a transition that is not in the drawing is a bug."""
        if status not in _TRANSITIONS[self.status]:
            raise AssertionError(f"{self.request_id}: {self.status.name} -> {status.name} is no legal transition")
        self.status = status

    def forget_engine(self) -> None:
        """Drop all that existed in the workers only; its tokens will be computed again."""
        self.row = None
        self.block_ids.clear()
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.num_in_flight = 0
        self.num_known_tokens = 0
        self.num_known_blocks = 0
        self.prefix_name = EMPTY_PREFIX
        self.num_registered_blocks = 0
        self.num_iterations = 0
        self.incarnation += 1
