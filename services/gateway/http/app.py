"""The HTTP front as one ASGI application: which address is served by what, and what surrounds them all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from services.gateway.http.authentication import AuthenticationMiddleware
from services.gateway.http.envelope import Envelope
from services.gateway.http.errors import HttpError, error_response, http_error_of
from services.gateway.http.inference import InferenceRoutes
from services.gateway.http.models import ModelRoutes
from services.gateway.http.page import page_routes
from services.gateway.http.parsing import BodyReader
from services.gateway.http.probes import ProbeRoutes
from services.gateway.http.tokenization import TokenizationRoutes
from shared.errors import OrcaError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp

    from services.gateway.api_keys import Authenticator
    from services.gateway.generation import Generation
    from services.gateway.readiness import Readiness
    from shared.config import HttpConfig

__all__ = ["build_app"]

_BODY_TIMEOUT_S = 60.0
_CORS_MAX_AGE_S = 600


def build_app(
    config: HttpConfig,
    generation: Generation,
    readiness: Readiness,
    authenticator: Authenticator,
    more_routes: Sequence[BaseRoute] = (),
) -> ASGIApp:
    """Build the application; ``more_routes`` are those of the gateway's other parts: the feed of the mesh."""
    reader = BodyReader(config.max_body_bytes, _BODY_TIMEOUT_S)
    inference = InferenceRoutes(generation, reader)
    tokenization = TokenizationRoutes(generation, reader)
    models = ModelRoutes(generation)
    probes = ProbeRoutes(readiness)
    application = Starlette(
        routes=[
            Route("/v1/completions", inference.completions, methods=["POST"]),
            Route("/v1/chat/completions", inference.chat_completions, methods=["POST"]),
            Route("/v1/models", models.models, methods=["GET"]),
            Route("/v1/models/{model:path}", models.model, methods=["GET"]),
            Route("/tokenize", tokenization.tokenize, methods=["POST"]),
            Route("/detokenize", tokenization.detokenize, methods=["POST"]),
            Route("/health", probes.health, methods=["GET"]),
            Route("/ready", probes.ready, methods=["GET"]),
            Route("/version", probes.version, methods=["GET"]),
            *page_routes(),
            *more_routes,
        ],
        middleware=[
            *_cors(config),
            Middleware(AuthenticationMiddleware, authenticator=authenticator),
        ],
        exception_handlers={HttpError: _answer, HTTPException: _answer, OrcaError: _answer},
    )
    application.router.redirect_slashes = False
    return Envelope(application, lambda: readiness.is_draining)


def _cors(config: HttpConfig) -> list[Middleware]:
    if not config.cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id", "Retry-After"],
            max_age=_CORS_MAX_AGE_S,
        )
    ]


async def _answer(request: Request, error: Exception) -> Response:
    del request
    return error_response(http_error_of(error))
