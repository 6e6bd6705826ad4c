"""The HTTP front as one ASGI application: which address is served by what, and what surrounds them all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from services.gateway.http.authentication import AuthenticationMiddleware
from services.gateway.http.chat_body import ChatBody
from services.gateway.http.completion_body import CompletionBody
from services.gateway.http.envelope import Envelope
from services.gateway.http.errors import HttpError, error_response, http_error_of
from services.gateway.http.failures import FailureMiddleware
from services.gateway.http.host_names import HostNameMiddleware
from services.gateway.http.inference import InferenceRoutes
from services.gateway.http.metrics import HttpMetrics
from services.gateway.http.models import ModelRoutes
from services.gateway.http.openapi import Endpoint, OpenApi
from services.gateway.http.page import page_routes
from services.gateway.http.parsing import BodyReader
from services.gateway.http.probes import ProbeRoutes
from services.gateway.http.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    DetokenizeAnswer,
    Health,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    Version,
)
from services.gateway.http.tokenization import TokenizationRoutes
from services.gateway.http.tokenization_body import DetokenizeBody, TokenizeBody
from shared.errors import OrcaError
from shared.tls import is_loopback

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
    metrics: HttpMetrics | None = None,
) -> ASGIApp:
    """Build the application; ``more_routes`` are those of the gateway's other parts: the feed of the mesh, metrics."""
    metrics = metrics or HttpMetrics()
    reader = BodyReader(config.max_body_bytes, _BODY_TIMEOUT_S)
    inference = InferenceRoutes(generation, reader)
    tokenization = TokenizationRoutes(generation, reader)
    models = ModelRoutes(generation)
    probes = ProbeRoutes(readiness)
    endpoints = [
        Endpoint("POST", "/v1/completions", inference.completions, Completion, CompletionBody, Completion),
        Endpoint(
            "POST", "/v1/chat/completions", inference.chat_completions, ChatCompletion, ChatBody, ChatCompletionChunk
        ),
        Endpoint("GET", "/v1/models", models.models, ModelList),
        Endpoint("GET", "/v1/models/{model:path}", models.model, ModelCard),
        Endpoint("POST", "/tokenize", tokenization.tokenize, TokenizeAnswer, TokenizeBody),
        Endpoint("POST", "/detokenize", tokenization.detokenize, DetokenizeAnswer, DetokenizeBody),
        Endpoint("GET", "/health", probes.health, Health, is_open=True),
        Endpoint("GET", "/ready", probes.ready, Health, is_open=True),
        Endpoint("GET", "/version", probes.version, Version),
    ]
    application = Starlette(
        routes=[
            *(endpoint.route for endpoint in endpoints),
            Route("/openapi.json", OpenApi(endpoints).document, methods=["GET"]),
            *page_routes(),
            *more_routes,
        ],
        middleware=[
            Middleware(Envelope, draining=lambda: readiness.is_draining, answered=metrics.answered),
            *_host_names(config, authenticator),
            *_cors(config),
            Middleware(FailureMiddleware),
            Middleware(AuthenticationMiddleware, authenticator=authenticator),
        ],
        exception_handlers={HttpError: _answer, HTTPException: _answer, OrcaError: _answer},
    )
    application.router.redirect_slashes = False
    return application


def _host_names(config: HttpConfig, authenticator: Authenticator) -> list[Middleware]:
    if authenticator.requires_key or not is_loopback(config.listen.host):
        return []
    return [Middleware(HostNameMiddleware, allowed=config.allowed_hosts)]


def _cors(config: HttpConfig) -> list[Middleware]:
    if not config.cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id", "traceparent"],
            expose_headers=["X-Request-Id", "Retry-After"],
            max_age=_CORS_MAX_AGE_S,
        )
    ]


async def _answer(request: Request, error: Exception) -> Response:
    del request
    return error_response(http_error_of(error))
