"""Guidance over two stages, beside a request that has none (scenario 29)."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from services.mesh.local_mesh import LocalMesh
from services.mesh.options import MeshOptions
from shared.client import GatewayClient, GenerateOptions
from shared.config import EngineConfig
from shared.errors import InvalidRequestError
from shared.generation import Guidance, GuidanceKind
from shared.messages import FinishReason
from shared.topology import Topology

if TYPE_CHECKING:
    from shared.generation import Finish

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
BAD = (
    '{"type": "foo"}',
    '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}',
    json.dumps({"enum": ["x" * (1 << 20)]}),
    '{"type": "integer", "multipleOf": 99999989}',
    '{"type": "string", "pattern": "(a"}',
    '{"not": {}}',
)
BLANKS = dict.fromkeys(b" \n\t\r", 100.0)
"""A model that wants white space and nothing else."""


async def _generate(client: GatewayClient, prompt: str, **options: Any) -> tuple[str, Finish]:
    text, finish = "", None
    async for delta in client.generate(prompt, GenerateOptions(**options)):
        text += delta.text
        finish = delta.finish or finish
    assert finish is not None
    return text, finish


async def test_guided_requests_are_to_the_letter_and_their_neighbour_does_not_notice() -> None:
    engine = EngineConfig(model="random:tiny-llama", topology=Topology(2, 1))
    json_object, person = Guidance(GuidanceKind.JSON_OBJECT), Guidance(GuidanceKind.JSON_SCHEMA, json.dumps(PERSON))
    plain: dict[str, Any] = {"temperature": 0.0, "max_tokens": 100, "ignore_eos": True}
    async with LocalMesh(MeshOptions(engine=engine)) as mesh, GatewayClient(mesh.gateway_address) as client:
        alone, _ = await _generate(client, "neighbour", **plain)
        async with asyncio.TaskGroup() as tasks:
            neighbours = [tasks.create_task(_generate(client, "neighbour", **plain)) for _ in range(2)]
            people = [
                tasks.create_task(_generate(client, "a person", guidance=person, max_tokens=200, seed=seed))
                for seed in range(4)
            ]
            short = tasks.create_task(_generate(client, "JSON", guidance=json_object, max_tokens=3, seed=1))
            blank = tasks.create_task(
                _generate(client, "JSON", guidance=json_object, max_tokens=120, logit_bias=BLANKS, seed=1)
            )
            refusals = [
                tasks.create_task(_refusal(client, guidance=Guidance(GuidanceKind.JSON_SCHEMA, schema), max_tokens=200))
                for schema in BAD
            ]
        assert [task.result()[0] for task in neighbours] == [alone] * 2
        for task in people:
            text, finish = task.result()
            assert finish.reason is FinishReason.STOP
            assert set(json.loads(text)) == set(PERSON["required"])
        text, finish = short.result()
        assert finish.reason is FinishReason.LENGTH
        assert finish.num_output_tokens == 3
        assert text.startswith("{")
        with pytest.raises(ValueError, match="line 1"):
            json.loads(text)
        text, _ = blank.result()
        outside_of_strings = re.sub(r'"[^"]*"?', "s", text)
        assert max(map(len, re.findall(r"\s+", outside_of_strings)), default=0) <= 17
        for refusal in refusals:
            assert "JSON schema" in refusal.result()


async def _refusal(client: GatewayClient, **options: Any) -> str:
    with pytest.raises(InvalidRequestError) as refusal:
        await _generate(client, "a", **options)
    return str(refusal.value)
