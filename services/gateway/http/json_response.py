"""A response whose body is a response model, as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["JsonResponse"]


class JsonResponse(Response):
    """The JSON of a model."""

    media_type = "application/json"

    def __init__(self, content: BaseModel, status_code: int = 200) -> None:
        super().__init__(content.model_dump_json(by_alias=True), status_code)
