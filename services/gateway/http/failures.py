"""An end for every failure: nothing that goes wrong gets out as anything but OpenAI's error object."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect

from services.gateway.http.errors import error_response, http_error_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["FailureMiddleware"]


class FailureMiddleware:
    """Answers for what is below. It stands below the rules for other origins, whose pages may read failures, too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; a response that has begun cannot become another one, so its failure goes on."""
        has_started = False

        async def send_noting(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        except ClientDisconnect:
            raise
        except Exception as error:
            if has_started:
                raise
            await error_response(http_error_of(error))(scope, receive, send)
