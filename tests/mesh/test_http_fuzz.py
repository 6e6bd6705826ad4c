"""Schemathesis over the HTTP front of a live mesh, by the front's own OpenAPI document: no 5xx, no shape of its own.

Both kinds of requests are made: such as the document allows, and such as it does not.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from services.mesh.local_mesh import LocalMesh
from services.mesh.options import MeshOptions
from shared.config import EngineConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from schemathesis.schemas import APIOperation

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = {"/v1/completions": 75, "/v1/chat/completions": 75}
"""Of each kind; other addresses have few fields."""


def operations(url: str) -> Iterator[APIOperation[Any, Any, Any, Any]]:
    for result in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        yield result.ok()  # type: ignore[union-attr]  # it raises where there is an error


def fuzz(operation: APIOperation[Any, Any, Any, Any], mode: schemathesis.GenerationMode) -> None:
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    @hypothesis.settings(
        max_examples=EXAMPLES.get(operation.path, 10),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def check(case: schemathesis.Case[Any]) -> None:
        response = case.call(timeout=20)
        streamed = response.headers.get("content-type", [""])[0].startswith("text/event-stream")
        case.validate_response(response, checks=CHECKS[:1] if streamed else CHECKS)

    check()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_no_request_is_too_much() -> None:
    options = MeshOptions(engine=EngineConfig(model="synthetic:step_ms=0", max_model_len=512))
    async with LocalMesh(options) as mesh:
        for operation in operations(mesh.http_address):
            for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
                if mode is schemathesis.GenerationMode.POSITIVE or operation.body:
                    await asyncio.to_thread(fuzz, operation, mode)
