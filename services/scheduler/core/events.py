"""What the core tells: what happened to requests, and how it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from services.scheduler.core.sequence import RequestKey, Sequence
    from shared.messages import FinishReason, PromptLogprobs, TokenLogprobs

__all__ = ["SchedulerStats", "TokenEvent"]


class TokenEvent(NamedTuple):
    """What happened to one request: a token, its end, both at once, or a piece of its prompt was scored."""

    key: RequestKey
    token_id: int | None
    finished: FinishReason | None = None
    sequence: Sequence | None = None
    """With ``finished``: the sequence as it ended, for timings."""
    error: str = ""
    logprobs: TokenLogprobs | None = None
    """Of the token, where the request asked."""
    prompt_logprobs: PromptLogprobs | None = None
    """Of a piece of the prompt."""


class SchedulerStats(NamedTuple):
    """A snapshot of the core. Counters count from the start of the service."""

    num_running: int
    """Started and not ended: in an iteration or between two."""
    num_waiting: int
    num_preempted: int
    """Of those that wait: had started and were put back."""
    num_in_flight_steps: int
    num_slots: int
    num_used_slots: int
    """Slots in blocks that sequences own."""
    num_cached_slots: int
    """Slots in blocks that nobody owns but the prefix cache can find."""
    num_steps: int
    num_output_tokens: int
    num_finished: int
    num_preemptions: int
    num_prompt_tokens: int
    """Prompt tokens of requests that have started."""
    num_cached_prompt_tokens: int
    """Of these, found in the prefix cache."""
    last_batch_size: int
    last_batch_tokens: int
