"""OpenAI's API as a load client sees it: streamed completions and conversations, and the list of models.

An event brings output where it has text. That a token has come whose text is not complete is not seen, with any server
alike. Tokens are counted by the server (``stream_options.include_usage``), never by events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from bench.load.endpoint import ServedModel
from bench.load.event_stream import EventStream
from bench.load.request_options import Api, PromptFormat
from bench.load.words import text_of
from shared.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ModelNotFoundError,
    OrcaError,
    OverloadedError,
    ProtocolError,
    UnauthenticatedError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.load.http_client import HttpAnswer, HttpClient
    from bench.load.records import Reception
    from bench.load.request_options import RequestOptions
    from bench.load.traces import TraceRequest

__all__ = ["OpenAiClient"]

_PATHS = {Api.COMPLETIONS: "/v1/completions", Api.CHAT: "/v1/chat/completions"}
_ERRORS: dict[int, type[OrcaError]] = {
    400: InvalidRequestError,
    401: UnauthenticatedError,
    403: UnauthenticatedError,
    404: ModelNotFoundError,
    408: DeadlineExceededError,
    422: InvalidRequestError,
    429: OverloadedError,
    503: UnavailableError,
}
_MAX_MESSAGE_CHARS = 300
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "refusal")
"""Of a conversation's delta."""


class OpenAiClient:
    """A `LoadClient` over HTTP."""

    def __init__(self, http: HttpClient, options: RequestOptions) -> None:
        self._http = http
        self._options = options
        self._path = _PATHS[options.api]

    async def models(self) -> Sequence[ServedModel]:
        """Return what ``/v1/models`` lists; nothing where there is no such list."""
        answer = await self._http.request("GET", "/v1/models")
        if answer.status in {404, 405, 501}:
            return ()
        _check(answer)
        try:
            return [_model(card) for card in orjson.loads(answer.body)["data"]]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ProtocolError("/v1/models is not a list of models: is this an endpoint of OpenAI's API?") from error

    async def send(self, request: TraceRequest, reception: Reception) -> None:
        """Stream a completion or the answer of a conversation."""
        answer = _StreamedAnswer(reception)
        _check(await self._http.request("POST", self._path, self.body(request), answer.feed))
        answer.check_whole()

    def body(self, request: TraceRequest) -> bytes:
        """Return a request as JSON."""
        options = self._options
        prompt = request.prompt if options.prompt_format is PromptFormat.TOKEN_IDS else text_of(request.prompt)
        body: dict[str, Any] = {
            "model": options.model,
            "max_tokens": request.max_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        match options.api:
            case Api.COMPLETIONS:
                body["prompt"] = prompt
            case Api.CHAT:
                body["messages"] = [{"role": "user", "content": prompt}]
        if options.ignore_eos:
            body["ignore_eos"] = True
        return orjson.dumps({**body, **options.extra_body})


class _StreamedAnswer:
    """Reads events into a `Reception`."""

    def __init__(self, reception: Reception) -> None:
        self._reception = reception
        self._events = EventStream()
        self._has_finished = False
        self._has_usage = False

    def feed(self, data: bytes, now_ns: int) -> None:
        for event in self._events.feed(data):
            if event != b"[DONE]":
                try:
                    self._take(orjson.loads(event), now_ns)
                except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
                    raise ProtocolError(f"an event that is not of OpenAI's API: {_shown(event)}") from error

    def _take(self, event: dict[str, Any], now_ns: int) -> None:
        if (failure := event.get("error")) is not None:
            raise OrcaError(f"the stream ended with an error: {_message(failure)}")
        reception = self._reception
        if choices := event.get("choices"):
            choice = choices[0]
            reception.ended_ns = now_ns
            delta = choice.get("delta")
            if choice.get("text") if delta is None else any(map(delta.get, _TEXT_FIELDS)) or delta.get("tool_calls"):
                reception.event_times_ns.append(now_ns)
            if choice.get("finish_reason") is not None:
                self._has_finished = True
        if usage := event.get("usage"):
            reception.num_prompt_tokens = int(usage["prompt_tokens"])
            reception.num_output_tokens = int(usage["completion_tokens"])
            self._has_usage = True

    def check_whole(self) -> None:
        """Raise ``ProtocolError`` where something is missing."""
        if not self._has_finished:
            raise ProtocolError("the answer ended without a finish reason: it is cut off, or no event stream")
        if not self._has_usage:
            raise ProtocolError("the answer has no usage: its tokens cannot be counted (stream_options.include_usage)")


def _model(card: dict[str, Any]) -> ServedModel:
    def number(name: str) -> int | None:
        value = card.get(name)
        return value if isinstance(value, int) and value > 0 else None

    return ServedModel(str(card["id"]), number("vocab_size"), number("max_model_len"))


def _check(answer: HttpAnswer) -> None:
    if answer.status == 200:
        return
    try:
        found = orjson.loads(answer.body)
        message = _message(found.get("error", found))
    except (ValueError, AttributeError):
        message = _shown(answer.body)
    raise _ERRORS.get(answer.status, OrcaError)(f"HTTP {answer.status}: {message}")


def _message(failure: Any) -> str:
    """Return what an error of the API says, in any of the shapes that servers give it."""
    if isinstance(failure, dict):
        failure = failure.get("message") or failure.get("detail") or failure
    return str(failure)[:_MAX_MESSAGE_CHARS]


def _shown(data: bytes) -> str:
    return data[:_MAX_MESSAGE_CHARS].decode("utf-8", "replace")
