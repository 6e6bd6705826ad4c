"""``/tokenize`` and ``/detokenize``, in vLLM's shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.gateway.http.json_response import JsonResponse
from services.gateway.http.models import check_model
from services.gateway.http.responses import DetokenizeAnswer, TokenizeAnswer
from services.gateway.http.tokenization_body import DetokenizeBody, TokenizeBody

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from services.gateway.generation import Generation
    from services.gateway.http.parsing import BodyReader

__all__ = ["TokenizationRoutes"]


class TokenizationRoutes:
    """The endpoints that turn text into token ids and back."""

    def __init__(self, generation: Generation, reader: BodyReader) -> None:
        self._generation = generation
        self._reader = reader

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text or a conversation."""
        body = await self._reader.read(request, TokenizeBody)
        engine = self._generation.model_info().engine
        check_model(body.model, engine.model)
        conversation = body.conversation()
        if conversation is None:
            text = body.prompt or ""
            ids = await self._generation.tokenize(text, add_special_tokens=body.add_special_tokens is not False)
        else:
            ids = await self._generation.tokenize_conversation(conversation)
        return JsonResponse(
            TokenizeAnswer(count=len(ids), max_model_len=engine.max_model_len, tokens=ids, token_strs=None)
        )

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        body = await self._reader.read(request, DetokenizeBody)
        check_model(body.model, self._generation.model_info().engine.model)
        return JsonResponse(DetokenizeAnswer(prompt=await self._generation.detokenize(body.tokens)))
