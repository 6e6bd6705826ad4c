"""Places for requests: so many in service at once, so many waiting before them, and one more is refused.

The waiting is here; whose turn it is, `fair_queue` decides. A request that is cancelled while it waits is gone at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING

from services.gateway.fair_queue import FairQueue, Ticket
from shared.clock import SystemClock
from shared.errors import InvalidRequestError, OverloadedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.gateway.clients import Client
    from shared.clock import Clock

__all__ = ["RequestLimit"]

_FIRST_GUESS_S = 1.0
"""How long a request takes, before any has ended."""
_NEWEST_PART = 0.1
"""What the latest request adds to the mean of how long they take."""
_RETRY_AFTER_S = (1, 60)
"""Shortest and longest hint."""


class RequestLimit:
    """The places of one gateway. Choices of a request take a place each, all at once."""

    def __init__(
        self, max_requests: int, *, max_queued: int = 0, max_queued_bytes: int = 1 << 28, clock: Clock | None = None
    ) -> None:
        """``max_requests`` in service; ``max_queued`` of ``max_queued_bytes`` in all wait for them."""
        self._max_requests = max_requests
        self._queue = FairQueue(max_served=max_requests, max_waiting=max_queued, max_waiting_bytes=max_queued_bytes)
        self._clock = clock or SystemClock()
        self._turns: dict[Ticket, asyncio.Future[OverloadedError | None]] = {}
        self._mean_service_s = _FIRST_GUESS_S
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_requests(self) -> int:
        """Requests in service and waiting."""
        return self._queue.num_requests

    @property
    def num_in_service(self) -> int:
        """Places that are taken."""
        return self._queue.num_served

    @property
    def num_queued(self) -> int:
        """Places that are waited for."""
        return self._queue.num_waiting

    @contextlib.asynccontextmanager
    async def slots(
        self, client: Client, num_places: int = 1, *, cost: float = 1.0, num_bytes: int = 0
    ) -> AsyncIterator[Ticket]:
        """Hold places for one request, once it is its turn.

        ``cost`` is the work that it is sure to be, in tokens: the prompt. Who knows at the end that it was more, with
        the output, sets ``spent`` of what this yields. ``num_bytes`` is what it keeps in memory while it waits.

        Raises:
            InvalidRequestError: so many places are never free at once.
            OverloadedError: as many wait as may. One that waits already is refused, too, when its client has more
                waiting than its share and another client needs the room.
        """
        self._check(client, num_places)
        ticket = Ticket(client, num_places, max(cost, 1.0), num_bytes)
        self._idle.clear()
        self._queue.enter(ticket)
        try:
            self._admit()
            if not self._queue.is_served(ticket):
                await self._turn(ticket)
            began_ns = self._clock.now_ns()
            try:
                yield ticket
            finally:
                self._note_duration((self._clock.now_ns() - began_ns) / 1e9)
        finally:
            self._turns.pop(ticket, None)
            self._queue.leave(ticket)
            self._admit()
            if not self._queue.num_requests:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no request is in service or waiting."""
        await self._idle.wait()

    def _check(self, client: Client, num_places: int) -> None:
        if num_places > self._max_requests:
            raise InvalidRequestError(
                f"the request asks for {num_places} choices; the gateway serves {self._max_requests} at once "
                "(--max-requests)"
            )
        if client.max_requests is not None and num_places > client.max_requests:
            raise InvalidRequestError(
                f"the request asks for {num_places} choices; this API key may have {client.max_requests} at once"
            )

    async def _turn(self, ticket: Ticket) -> None:
        """Wait for places. Raises ``OverloadedError``."""
        turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
        for refused in self._queue.shed(ticket):
            refused_turn = self._turns[refused]
            if not refused_turn.done():  # else it is being cancelled
                refused_turn.set_result(self._overloaded(refused))
        refusal = await turn
        if refusal is not None:
            raise refusal

    def _admit(self) -> None:
        for ticket in self._queue.admit():
            turn = self._turns.get(ticket)
            if turn is not None and not turn.done():  # else it has not begun to wait, or is being cancelled
                turn.set_result(None)

    def _overloaded(self, ticket: Ticket) -> OverloadedError:
        queue = self._queue
        ahead = queue.num_waiting + ticket.num_places
        wait_s = self._mean_service_s * ahead / self._max_requests
        shortest, longest = _RETRY_AFTER_S
        return OverloadedError(
            f"the gateway serves {queue.num_served} requests (--max-requests {self._max_requests}) and "
            f"{queue.num_waiting} wait (--max-queued, --max-queued-bytes); try again later or use another gateway",
            retry_after_s=min(max(math.ceil(wait_s), shortest), longest),
        )

    def _note_duration(self, duration_s: float) -> None:
        self._mean_service_s += _NEWEST_PART * (duration_s - self._mean_service_s)
