"""Who asks: what the gateway knows of the caller of a request, and how that reaches the request's handler.

A client is found out once, where a call comes in; a context variable takes it along, since each call is a task of its
own. Knows neither keys nor protocols.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

__all__ = ["ANONYMOUS", "Client", "bind_client", "calling_client"]


@dataclass(frozen=True, slots=True)
class Client:
    """Somebody who sends requests, and what they may have of the mesh."""

    name: str
    """For logs and metrics; never the secret."""
    weight: float = 1.0
    """Share of the work when several clients want more than there is, relative to the others' weights."""
    max_requests: int | None = None
    """Requests in service at once, choices counted; None leaves it to the gateway's own limit."""


ANONYMOUS = Client("anonymous")
"""Everybody, where no API keys are configured."""

_CALLING: ContextVar[Client] = ContextVar("calling_client", default=ANONYMOUS)


def bind_client(client: Client) -> None:
    """Say who makes the call that the current task serves."""
    _CALLING.set(client)


def calling_client() -> Client:
    """Return who makes the call that the current task serves."""
    return _CALLING.get()
