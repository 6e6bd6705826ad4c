"""How deltas reach the client: in one piece or as server-sent events, until it leaves.

Nothing is sent before the first delta, which says that the request was accepted: whatever is refused has a status of
its own. What fails after that is one event with the error, and the connection closes; there is neither a finish reason
nor ``[DONE]`` then. A client that leaves ends the iterator, and thus its request, at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from services.gateway.http.answer import Choice
from services.gateway.http.connection import response_control
from services.gateway.http.errors import http_error_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

    from starlette.types import Receive, Scope, Send

    from services.gateway.http.answer import Answer
    from services.gateway.http.connection import ResponseControl
    from shared.generation import Delta, Usage

__all__ = ["EVENT_STREAM_HEADERS", "EventStreamResponse", "WholeResponse", "until_disconnect"]

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"


class WholeResponse(Response):
    """The answer in one piece, once all of it is there."""

    def __init__(self, deltas: AsyncGenerator[Delta, None], answer: Answer, num_choices: int) -> None:
        self._deltas = deltas
        self._answer = answer
        self._num_choices = num_choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate, then send."""
        async with contextlib.aclosing(self._deltas):
            await until_disconnect(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        accepted = await anext(self._deltas)
        choices = [Choice() for _ in range(self._num_choices)]
        usage: Usage | None = None
        async for delta in self._deltas:
            choices[delta.choice].add(delta)
            usage = delta.usage
        assert usage is not None
        content = self._answer.whole(accepted.prompt_token_ids, choices, usage)
        await Response(content, media_type="application/json")(scope, receive, send)


class EventStreamResponse(Response):
    """The answer as it comes."""

    def __init__(self, deltas: AsyncGenerator[Delta, None], answer: Answer, *, includes_usage: bool) -> None:
        self._deltas = deltas
        self._answer = answer
        self._includes_usage = includes_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the beginning as soon as the request is accepted, then what comes."""
        async with contextlib.aclosing(self._deltas):
            await until_disconnect(receive, self._send(scope, send))

    async def _send(self, scope: Scope, send: Send) -> None:
        accepted = await anext(self._deltas)
        control = response_control(scope)
        control.streams_events = True
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
        await send(_body(self._answer.opening(accepted.prompt_token_ids)))
        try:
            last = await self._send_events(control, send)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client must not take it for an end
            control.close_afterwards()
            last = b"data: " + http_error_of(error).body() + b"\n\n"
        await send(_body(last, more=False))

    async def _send_events(self, control: ResponseControl, send: Send) -> bytes:
        """Send all but the last events, which are returned."""
        usage: Usage | None = None
        answer = self._answer
        async for delta in self._deltas:
            usage = delta.usage
            data = answer.events(delta)
            if data and not control.write(data):
                await send(_body(data))
        assert usage is not None
        return (answer.usage_event(usage) if self._includes_usage else b"") + _DONE


def _body(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do ``work``; give it up as soon as the client has left."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.wait({working, watching})
    if not working.cancelled():
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
