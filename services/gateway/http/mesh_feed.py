"""``GET /api/mesh``: snapshots of the mesh as server-sent events, for the page and whoever else wants to see.

Each event is one `shared.mesh_view.MeshSnapshot` as a JSON object of the same names, but for the iterations: those are
columns, and their times are microseconds before ``taken_ns``, which keeps numbers short.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.http.connection import response_control
from services.gateway.http.delivery import EVENT_STREAM_HEADERS, until_disconnect
from shared.errors import InvalidRequestError
from shared.mesh_view import DEFAULT_INTERVAL_S

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from services.gateway.watch import MeshWatch
    from shared.mesh_view import MeshSnapshot, StageTimeline

__all__ = ["feed_routes", "snapshot_json"]


def feed_routes(watch: MeshWatch) -> list[Route]:
    """Return the route of the feed."""

    async def feed(request: Request) -> Response:
        return _Feed(watch.snapshots(_interval_s(request)))

    return [Route("/api/mesh", feed, methods=["GET"])]


def snapshot_json(snapshot: MeshSnapshot) -> bytes:
    """Return a snapshot as the feed tells it."""
    engine = snapshot.engine
    return orjson.dumps(
        {
            "gateway_id": snapshot.gateway_id,
            "num_gateway_requests": snapshot.num_gateway_requests,
            "engine": {
                "status": dataclasses.asdict(engine.status),
                "taken_ns": engine.taken_ns,
                "stages": [_columns(stage, engine.taken_ns) for stage in engine.stages],
                "output_tokens_per_s": engine.output_tokens_per_s,
                "prefill_tokens_per_s": engine.prefill_tokens_per_s,
                "steps_per_s": engine.steps_per_s,
            },
        }
    )


class _Feed(Response):
    """Snapshots until the client or the gateway leaves."""

    def __init__(self, snapshots: AsyncGenerator[MeshSnapshot, None]) -> None:
        self._snapshots = snapshots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send; whoever may not watch is refused before the response has begun."""
        async with contextlib.aclosing(self._snapshots):
            await until_disconnect(receive, self._send(scope, send))

    async def _send(self, scope: Scope, send: Send) -> None:
        snapshot = await anext(self._snapshots, None)
        response_control(scope).streams_events = True
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
        while snapshot is not None:
            await send(
                {
                    "type": "http.response.body",
                    "body": b"data: " + snapshot_json(snapshot) + b"\n\n",
                    "more_body": True,
                }
            )
            snapshot = await anext(self._snapshots, None)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _interval_s(request: Request) -> float:
    given = request.query_params.get("interval_s")
    if given is None:
        return DEFAULT_INTERVAL_S
    try:
        return float(given)
    except ValueError:
        raise InvalidRequestError(f"interval_s is {given[:40]!a}; it must be a number of seconds") from None


def _columns(timeline: StageTimeline, taken_ns: int) -> dict[str, Any]:
    steps = timeline.steps
    return {
        "stage": timeline.stage,
        "step_ids": [step.step_id for step in steps],
        "received_us_ago": [(taken_ns - step.received_ns) // 1000 for step in steps],
        "started_us_ago": [(taken_ns - step.started_ns) // 1000 for step in steps],
        "ended_us_ago": [(taken_ns - step.ended_ns) // 1000 for step in steps],
        "num_sequences": [step.num_sequences for step in steps],
        "num_tokens": [step.num_tokens for step in steps],
        "num_decode_tokens": [step.num_decode_tokens for step in steps],
    }
