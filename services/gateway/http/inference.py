"""``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

import contextlib
import hashlib
import time
from typing import TYPE_CHECKING

from services.gateway.http.answer import Head
from services.gateway.http.chat_answer import ChatAnswer
from services.gateway.http.chat_body import ChatBody
from services.gateway.http.completion_answer import CompletionAnswer
from services.gateway.http.completion_body import CompletionBody
from services.gateway.http.delivery import EventStreamResponse, WholeResponse
from services.gateway.http.models import check_model
from services.gateway.http.request_ids import request_id_of
from services.gateway.http.version import VERSION
from shared.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request
    from starlette.responses import Response

    from services.gateway.generation import Generation
    from services.gateway.http.answer import Answer
    from services.gateway.http.parsing import BodyReader
    from shared.generation import Delta
    from shared.messages import EngineInfo

__all__ = ["InferenceRoutes"]


class InferenceRoutes:
    """The endpoints that generate."""

    def __init__(self, generation: Generation, reader: BodyReader) -> None:
        self._generation = generation
        self._reader = reader

    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        body = await self._reader.read(request, CompletionBody)
        head = self._head(request, body.model, "cmpl-")
        wanted = body.request(request_id_of(request.scope))
        num_choices = len(wanted.prompts) * wanted.options.n
        return _response(self._generation.generate(wanted), CompletionAnswer(head, body), body, num_choices)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        body = await self._reader.read(request, ChatBody)
        head = self._head(request, body.model, "chatcmpl-")
        wanted = body.request(request_id_of(request.scope))
        return _response(self._generation.chat(wanted), ChatAnswer(head, body), body, wanted.options.n)

    def _head(self, request: Request, model: str | None, prefix: str) -> Head:
        engine = self._generation.model_info().engine
        check_model(model, engine.model)
        return Head(prefix + request_id_of(request.scope), int(time.time()), engine.model, _fingerprint(engine))


def _response(
    deltas: AsyncGenerator[Delta, None], answer: Answer, body: CompletionBody | ChatBody, num_choices: int
) -> Response:
    if body.guidance_field is not None:
        deltas = _naming(deltas, body.guidance_field)
    if body.stream:
        return EventStreamResponse(deltas, answer, includes_usage=body.includes_usage)
    return WholeResponse(deltas, answer, num_choices)


async def _naming(deltas: AsyncGenerator[Delta, None], guidance_field: str) -> AsyncGenerator[Delta, None]:
    """Hand on; a refusal of the guidance names the field that it came from."""
    async with contextlib.aclosing(deltas):
        try:
            async for delta in deltas:
                yield delta
        except InvalidRequestError as error:
            if error.field != "guidance":
                raise
            raise InvalidRequestError(str(error), field=guidance_field) from error


def _fingerprint(engine: EngineInfo) -> str:
    """Return what changes with anything that the same seed's output depends on."""
    text = f"{VERSION} {engine.model} {engine.dtype} {engine.num_stages}x{engine.tp_size}"
    return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:10]}"
