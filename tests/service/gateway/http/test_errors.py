"""Failures: before the first delta a status, after it one event and the end of the connection."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from shared import errors
from shared.generation import Delta
from shared.rpc import error_of
from shared.status import StatusCode
from tests.fakes.fake_generation import last

if TYPE_CHECKING:
    from tests.service.gateway.http.conftest import RunningFront

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
}

FAILURES: list[tuple[Exception, int, dict[str, Any]]] = [
    (
        errors.InvalidRequestError("temperature is -1; it must be at least 0", field="temperature"),
        400,
        {"type": "invalid_request_error", "param": "temperature", "code": None},
    ),
    (errors.InvalidRequestError("the prompt has 99 tokens", field="prompts"), 400, {"param": "prompt"}),
    (errors.InvalidRequestError("prompts[2] is empty", field="prompts[2]"), 400, {"param": "prompt[2]"}),
    (
        errors.InvalidRequestError("messages[1].content is strange", field="messages[1].content"),
        400,
        {"param": "messages[1].content"},
    ),
    (errors.InvalidRequestError("no such grammar", field="guidance"), 400, {"param": None}),
    (errors.InvalidRequestError("nothing of the kind"), 400, {"param": None}),
    (errors.ModelError("the model has no chat template"), 400, {"type": "invalid_request_error"}),
    (errors.UnauthenticatedError("no"), 401, {"code": "invalid_api_key"}),
    (error_of(StatusCode.PERMISSION_DENIED, "no"), 403, {"type": "permission_error"}),
    (errors.ModelNotFoundError("no such model"), 404, {"code": "not_found"}),
    (errors.OverloadedError("full"), 429, {"type": "rate_limit_error", "code": "rate_limit_exceeded"}),
    (errors.ProtocolError("a gap"), 500, {"type": "server_error", "code": "internal_error"}),
    (errors.UnavailableError("gone"), 503, {"type": "server_error", "code": "service_unavailable"}),
    (errors.EngineLostError("lost"), 503, {"code": "service_unavailable"}),
    (error_of(StatusCode.CANCELLED, "cancelled"), 503, {"code": "cancelled"}),
    (error_of(StatusCode.DEADLINE_EXCEEDED, "late"), 408, {"type": "timeout_error", "code": "timeout"}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("failure", "status", "error"), FAILURES)
async def test_a_failure_before_acceptance_is_a_status(
    front: RunningFront, path: str, stream: bool, failure: Exception, status: int, error: dict[str, Any]
) -> None:
    asking = asyncio.create_task(front.post(path, BODIES[path] | {"stream": stream}))
    (await front.generation.call()).send(failure)
    response = await asking
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    told = response.json()["error"]
    assert told["message"] == str(failure)
    assert told | error == told
    assert ("retry-after" in response.headers) == (status in {429, 503})
    assert (response.headers.get("www-authenticate") == "Bearer") == (status == 401)


@pytest.mark.parametrize(("retry_after_s", "header"), [(None, "1"), (0.2, "1"), (7.2, "8")])
async def test_when_to_come_again(front: RunningFront, retry_after_s: float | None, header: str) -> None:
    asking = asyncio.create_task(front.post(COMPLETIONS, BODIES[COMPLETIONS]))
    (await front.generation.call()).send(errors.OverloadedError("full", retry_after_s=retry_after_s))
    assert (await asking).headers["retry-after"] == header


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("failure", "status", "error"), FAILURES)
async def test_a_failure_in_a_stream_is_its_last_event(
    front: RunningFront, path: str, failure: Exception, status: int, error: dict[str, Any]
) -> None:
    reader, writer = await front.connect()
    body = BODIES[path] | {"stream": True, "stream_options": {"include_usage": True}}
    writer.write(front.raw(path, body))
    call = await front.generation.call()
    call.accept()
    call.send(Delta("hello"), failure)
    # The connection closes by itself, within a second.
    text = (await asyncio.wait_for(reader.read(), 1)).decode()
    writer.close()
    await writer.wait_closed()
    assert text.startswith("HTTP/1.1 200 OK\r\n")
    assert "hello" in text
    assert "[DONE]" not in text
    assert '"finish_reason":"' not in text
    *_, event = (line for line in text.splitlines() if line.startswith("data: "))
    told = json.loads(event.removeprefix("data: "))
    assert set(told) == {"error"}
    assert told["error"]["message"] == str(failure)
    assert told["error"] | error == told["error"]
    assert text.endswith("\r\n0\r\n\r\n"), "the body is whole: whoever reads it all gets to the error"


@pytest.mark.parametrize("path", BODIES)
async def test_a_failure_in_an_unstreamed_answer_is_a_status(front: RunningFront, path: str) -> None:
    asking = asyncio.create_task(front.post(path, BODIES[path]))
    call = await front.generation.call()
    call.accept()
    call.send(Delta("hello"), errors.EngineLostError("lost"))
    assert (await asking).status_code == 503


@pytest.mark.parametrize("after", [False, True])
async def test_what_is_not_ours_is_logged_and_stays_hidden(front: RunningFront, after: bool) -> None:
    with structlog.testing.capture_logs() as logs:
        asking = asyncio.create_task(front.post(COMPLETIONS, BODIES[COMPLETIONS] | {"stream": after}))
        call = await front.generation.call()
        if after:
            call.accept()
        call.send(ZeroDivisionError("secret"))
        response = await asking
    assert response.status_code == (200 if after else 500)
    assert "secret" not in response.text
    assert "internal_error" in response.text
    assert "http_request_failed" in [entry["event"] for entry in logs]


async def test_a_gateway_that_is_not_ready_says_why(front: RunningFront) -> None:
    front.generation.not_ready = front.readiness.why_not = errors.UnavailableError("not ready: a part is missing")
    for path, body in BODIES.items():
        response = await front.post(path, body)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["message"] == "not ready: a part is missing"
    for path in ("/v1/models", "/v1/models/synthetic:"):
        assert (await front.client.get(path)).status_code == 503
    ready = await front.client.get("/ready")
    assert ready.status_code == 503
    assert ready.json() == {"status": "not ready", "reason": "not ready: a part is missing"}
    assert ready.headers["retry-after"] == "1"
    assert (await front.client.get("/health")).status_code == 200


async def test_addresses_and_methods_that_are_none(front: RunningFront) -> None:
    for path in ("/nope", "/v1", "/v1/", "/v1/completions/", "//v1/completions", "/V1/completions", "/health/"):
        response = await front.client.request("POST", front.server.address + path, json={"prompt": "x"})
        assert response.status_code == 404, path
        assert response.json()["error"]["code"] == "unknown_url"
    response = await front.client.get(COMPLETIONS)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["code"] == "method_not_allowed"


async def test_request_ids_come_back(front: RunningFront) -> None:
    front.generation.answer = [last()]
    for given, kept in (("abc-1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False)):
        response = await front.post(COMPLETIONS, BODIES[COMPLETIONS], headers={"X-Request-Id": given})
        request_id = response.headers["x-request-id"]
        assert (request_id == given) is kept
        assert response.json()["id"] == f"cmpl-{request_id}"
        assert (await front.generation.call()).request.request_id == request_id


async def test_messages_have_the_names_of_this_front(front: RunningFront) -> None:
    front.generation.answer = [errors.InvalidRequestError("timeout_s is -1; it must be above 0", field="timeout_s")]
    error = await front.refused("/v1/completions", {"prompt": "x"})
    assert (error["param"], error["message"]) == ("timeout", "timeout is -1; it must be above 0")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_a_refusal_of_guidance_names_its_field(front: RunningFront, body: dict[str, Any], param: str) -> None:
    front.generation.answer = [errors.InvalidRequestError("it cannot be forced", field="guidance")]
    error = await front.refused("/v1/completions", {"prompt": "x"} | body)
    assert error["param"] == param
