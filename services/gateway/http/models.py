"""``/v1/models``: the one model that is served."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from services.gateway.http.errors import HttpError
from services.gateway.http.json_response import JsonResponse
from services.gateway.http.responses import ModelCard, ModelList

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from services.gateway.generation import Generation

__all__ = ["ModelRoutes", "check_model"]


def check_model(asked: str | None, served: str) -> None:
    """Raise ``HttpError`` where another model is asked for."""
    if asked is not None and asked != served:
        raise HttpError(
            404,
            f"The model `{asked[:200]}` does not exist; this gateway serves `{served}`",
            param="model",
            code="model_not_found",
        )


class ModelRoutes:
    """The endpoints that tell which model there is."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        """List the model."""
        del request
        return JsonResponse(ModelList(data=[self._card()]))

    async def model(self, request: Request) -> Response:
        """Tell of one model."""
        card = self._card()
        check_model(request.path_params["model"], card.id)
        return JsonResponse(card)

    def _card(self) -> ModelCard:
        engine = self._generation.model_info().engine
        return ModelCard(
            id=engine.model,
            created=self._created,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
        )
