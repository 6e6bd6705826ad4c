"""Bodies that are small in bytes and huge in what they hold: refused at little cost, while others are served."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from typing import TYPE_CHECKING

import pytest

from services.gateway.http.body_size import MAX_CONTAINERS, MAX_ITEMS, MAX_KEYS

if TYPE_CHECKING:
    from tests.service.gateway.http.conftest import RunningFront

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
MIB = 1 << 20


def _joined(item: bytes, number: int) -> bytes:
    return b",".join([item] * number)


HUGE = {
    "empty prompts": (COMPLETIONS, b'{"prompt":[' + _joined(b"[]", 2_700_000) + b"]}", 413),
    "ids": (COMPLETIONS, b'{"prompt":[' + _joined(b"1", 4_190_000) + b"]}", 413),
    "unknown keys": (COMPLETIONS, b"{" + b",".join(b'"a%d":1' % index for index in range(600_000)) + b"}", 413),
    "messages": (CHAT, b'{"messages":[' + _joined(b'{"role":"user","content":"a"}', 200_000) + b"]}", 413),
    "faulty messages": (CHAT, b'{"messages":[' + _joined(b'{"role":"user","content":1}', 200_000) + b"]}", 413),
    "as many keys as may be": (COMPLETIONS, json.dumps(dict.fromkeys(map(str, range(MAX_KEYS)))).encode(), 400),
    "as many messages as may be": (CHAT, b'{"messages":[' + _joined(b'{"a":1,"b":2}', MAX_KEYS // 2 - 1) + b"]}", 400),
    "as many lists as may be": (COMPLETIONS, b'{"prompt":[' + _joined(b"[[]]", MAX_CONTAINERS // 2 - 1) + b"]}", 400),
    "faulty choices": (COMPLETIONS, b'{"prompt":"a","guided_choice":[' + _joined(b"1", MAX_ITEMS - 1) + b"]}", 400),
}


@pytest.mark.parametrize("name", HUGE)
async def test_others_are_served_meanwhile(front: RunningFront, name: str) -> None:
    path, content, status = HUGE[name]
    clock = time.process_time  # how long this process holds others up, whatever else the machine does
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    huge = [asyncio.create_task(front.client.post(path, content=content, headers=JSON)) for _ in range(3)]
    longest_s = 0.0
    while not all(task.done() for task in huge):
        started = clock()
        assert (await front.client.get("/health")).status_code == 200
        longest_s = max(longest_s, clock() - started)
    for task in huge:
        assert task.result().status_code == status
    assert longest_s < 1
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < 300 * MIB


DEEP_SCHEMAS = [
    (COMPLETIONS, '{"prompt":"a","guided_json":%s}', "guided_json"),
    (COMPLETIONS, '{"prompt":"a","structured_outputs":{"json":%s}}', "structured_outputs.json"),
    (
        CHAT,
        '{"messages":[],"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":%s}}}',
        "response_format.json_schema.schema",
    ),
    (
        CHAT,
        '{"messages":[],"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]}',
        "tools[0].function.parameters",
    ),
    ("/tokenize", '{"messages":[],"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]}', "tools"),
]


@pytest.mark.parametrize("depth", [257, 900, 1000, 1015])
@pytest.mark.parametrize(("path", "body", "param"), DEEP_SCHEMAS)
async def test_what_is_nested_too_deeply_is_refused(
    front: RunningFront, depth: int, path: str, body: str, param: str
) -> None:
    content = body % ('{"items":' * depth + "{}" + "}" * depth)
    response = await front.client.post(path, content=content, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)
    assert "nested more than 256 levels deep" in response.json()["error"]["message"]


async def test_the_first_faulty_item_is_told(front: RunningFront) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": 1}, {"role": "nobody"}]
    error = await front.refused(CHAT, {"messages": messages})
    assert error["param"] == "messages[1].content"


async def test_what_is_too_much_is_said(front: RunningFront) -> None:
    path, content, _ = HUGE["unknown keys"]
    error = (await front.client.post(path, content=content, headers=JSON)).json()["error"]
    assert error["code"] == "request_too_large"
    assert "32768 keys" in error["message"]
