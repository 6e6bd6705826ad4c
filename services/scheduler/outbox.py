"""What one gateway has still to be told.

Events pile up in columns while the gateway is slow and leave as one message as soon as it takes the next: the scheduler
never waits for a gateway, and what piles up is bounded by the tokens that its requests may have.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from shared.messages import SessionEvents

if TYPE_CHECKING:
    from shared.ids import Handle
    from shared.messages import Ended, EngineInfo, PromptLogprobs, TokenLogprobs

__all__ = ["Outbox"]


class Outbox:
    """Events of one session, merged until they are taken."""

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self._some = asyncio.Event()
        self._closed = False
        self._clear()

    def _clear(self) -> None:
        self._handles: list[Handle] = []
        self._token_ids: list[int] = []
        self._ended: list[Ended] = []
        self._token_logprobs: dict[int, TokenLogprobs] = {}
        self._prompt_logprobs: list[tuple[Handle, PromptLogprobs]] = []
        self._engine_ready: EngineInfo | None = None
        self._engine_lost = False

    def token(self, handle: Handle, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        """A request has a token."""
        if logprobs is not None:
            self._token_logprobs[len(self._handles)] = logprobs
        self._handles.append(handle)
        self._token_ids.append(token_id)
        self._some.set()

    def prompt_scored(self, handle: Handle, piece: PromptLogprobs) -> None:
        """A piece of a request's prompt has its log probabilities."""
        self._prompt_logprobs.append((handle, piece))
        self._some.set()

    def ended(self, ended: Ended) -> None:
        """A request has ended."""
        self._ended.append(ended)
        self._some.set()

    def engine_ready(self, info: EngineInfo) -> None:
        """The engine is there, perhaps again."""
        self._engine_ready = info
        self._engine_lost = False
        self._some.set()

    def engine_lost(self) -> None:
        """The engine is gone; requests are kept."""
        self._engine_ready = None
        self._engine_lost = True
        self._some.set()

    def close(self) -> None:
        """Nothing more will come; what is there is still taken."""
        self._closed = True
        self._some.set()

    async def take(self) -> SessionEvents | None:
        """Wait for events and take all there are; None after the last."""
        await self._some.wait()
        if not (
            self._handles or self._ended or self._prompt_logprobs or self._engine_ready is not None or self._engine_lost
        ):
            return None
        events = SessionEvents(
            self._handles,
            self._token_ids,
            self._ended,
            self._engine_ready,
            self._engine_lost,
            self._token_logprobs,
            self._prompt_logprobs,
        )
        self._clear()
        if not self._closed:
            self._some.clear()
        return events
