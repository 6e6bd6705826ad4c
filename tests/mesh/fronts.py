"""One way to ask, two fronts to ask through: gRPC by the typed client, HTTP by the official ``openai`` package."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import openai

from shared.errors import InvalidRequestError
from shared.generation import GuidanceKind, ToolMode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from shared.client import GatewayClient
    from shared.generation import ChatRequest, GenerateOptions, GenerateRequest, TokenLogprob

__all__ = ["Answer", "Choice", "Front", "GrpcFront", "HttpFront", "RefusedError"]


class RefusedError(Exception):
    """The front refused the request as one that can never succeed."""


@dataclass
class Choice:
    """One output, put together."""

    text: str = ""
    finish_reason: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    token_bytes: list[bytes] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    tool_calls: list[tuple[str, str]] = field(default_factory=list)
    """(name, arguments)"""


@dataclass
class Answer:
    """All outputs, and what they took."""

    choices: list[Choice]
    num_prompt_tokens: int
    num_output_tokens: int


class Front(Protocol):
    """Either of the two."""

    async def generate(self, request: GenerateRequest, *, stream: bool = True) -> Answer:
        """Continue prompts. Raises ``RefusedError``."""

    async def chat(self, request: ChatRequest, *, stream: bool = True) -> Answer:
        """Answer a conversation. Raises ``RefusedError``."""

    def first_piece(self, request: GenerateRequest) -> contextlib.AbstractAsyncContextManager[None]:
        """Hold a stream open once its first text is here; leaving the block gives it up."""


class GrpcFront:
    """The gRPC API; it only streams."""

    def __init__(self, client: GatewayClient) -> None:
        self._client = client

    async def generate(self, request: GenerateRequest, *, stream: bool = True) -> Answer:
        return await self._collect(self._client.generate(request), chat=False)

    async def chat(self, request: ChatRequest, *, stream: bool = True) -> Answer:
        return await self._collect(self._client.chat(request), chat=True)

    @contextlib.asynccontextmanager
    async def first_piece(self, request: GenerateRequest) -> AsyncIterator[None]:
        async with contextlib.aclosing(self._client.generate(request)) as deltas:
            async for delta in deltas:
                if delta.text:
                    break
            yield

    async def _collect(self, deltas: AsyncIterator[Any], *, chat: bool) -> Answer:
        choices: dict[int, Choice] = {}
        usage = None
        try:
            async for delta in deltas:
                choice = choices.setdefault(delta.choice, Choice())
                choice.text += delta.text
                choice.token_ids += delta.token_ids
                for token in delta.logprobs:
                    self._add(choice, token)
                for call in delta.tool_calls:
                    if call.index == len(choice.tool_calls):
                        choice.tool_calls.append((call.name, ""))
                    name, arguments = choice.tool_calls[call.index]
                    choice.tool_calls[call.index] = name, arguments + call.arguments
                if delta.finish is not None:
                    choice.finish_reason = delta.finish.reason.name.lower()
                usage = delta.usage or usage
        except InvalidRequestError as refusal:
            raise RefusedError(str(refusal)) from refusal
        assert usage is not None
        return Answer([choices[index] for index in sorted(choices)], usage.num_prompt_tokens, usage.num_output_tokens)

    @staticmethod
    def _add(choice: Choice, token: TokenLogprob) -> None:
        choice.logprobs.append(token.logprob)
        choice.token_bytes.append(token.token_bytes)
        choice.top_logprobs.append({top.token: top.logprob for top in token.top})


class HttpFront:
    """The OpenAI API."""

    def __init__(self, client: openai.AsyncOpenAI, model: str) -> None:
        self._client = client
        self._model = model

    async def generate(self, request: GenerateRequest, *, stream: bool = True) -> Answer:
        prompts = [prompt if isinstance(prompt, str) else list(prompt) for prompt in request.prompts]
        body = _options(request.options) | {
            "prompt": prompts,
            "echo": request.echo,
            "logprobs": request.options.num_logprobs,
        }
        choices: dict[int, Choice] = {}
        async for piece, usage in self._pieces("completions", body, stream=stream):
            for part in piece.choices:
                choice = choices.setdefault(part.index, Choice())
                choice.text += part.text
                choice.finish_reason = part.finish_reason or choice.finish_reason
                choice.token_ids += getattr(part, "prompt_token_ids", None) or [] if request.echo else []
                choice.token_ids += getattr(part, "token_ids", None) or []
                if part.logprobs is not None:
                    choice.logprobs += part.logprobs.token_logprobs
                    choice.top_logprobs += [top or {} for top in part.logprobs.top_logprobs or []]
            last = usage
        return Answer([choices[index] for index in sorted(choices)], last.prompt_tokens, last.completion_tokens)

    async def chat(self, request: ChatRequest, *, stream: bool = True) -> Answer:
        body = _options(request.options) | {
            "messages": [{"role": message.role, "content": message.content} for message in request.messages],
            "logprobs": request.options.num_logprobs is not None,
            "top_logprobs": request.options.num_logprobs,
        }
        if request.tools:
            body["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": json.loads(tool.parameters or "{}"),
                    },
                }
                for tool in request.tools
            ]
            body["tool_choice"] = (
                {"type": "function", "function": {"name": request.tool_choice.name}}
                if request.tool_choice.mode is ToolMode.NAMED
                else request.tool_choice.mode.value
            )
        choices: dict[int, Choice] = {}
        async for piece, usage in self._pieces("chat/completions", body, stream=stream):
            for part in piece.choices:
                choice = choices.setdefault(part.index, Choice())
                message = part.delta if stream else part.message
                choice.text += message.content or ""
                choice.finish_reason = part.finish_reason or choice.finish_reason
                choice.token_ids += getattr(part, "token_ids", None) or []
                for call in message.tool_calls or []:
                    if not stream or call.index == len(choice.tool_calls):
                        choice.tool_calls.append((call.function.name, "" if stream else call.function.arguments))
                    if stream:
                        name, arguments = choice.tool_calls[call.index]
                        choice.tool_calls[call.index] = name, arguments + (call.function.arguments or "")
                for token in (part.logprobs.content or []) if part.logprobs is not None else []:
                    choice.logprobs.append(token.logprob)
                    choice.token_bytes.append(bytes(token.bytes or []))
                    choice.top_logprobs.append({top.token: top.logprob for top in token.top_logprobs})
            last = usage
        return Answer([choices[index] for index in sorted(choices)], last.prompt_tokens, last.completion_tokens)

    @contextlib.asynccontextmanager
    async def first_piece(self, request: GenerateRequest) -> AsyncIterator[None]:
        body = _options(request.options) | {"prompt": list(request.prompts)}
        stream = await self._client.post(
            "/completions",
            body={**body, "model": self._model, "stream": True},
            cast_to=openai.types.Completion,
            stream=True,
            stream_cls=openai.AsyncStream[openai.types.Completion],
        )
        async with stream:
            async for piece in stream:
                if piece.choices and piece.choices[0].text:
                    break
            yield

    async def _pieces(self, route: str, body: dict[str, Any], *, stream: bool) -> AsyncIterator[tuple[Any, Any]]:
        """Each chunk with the usage so far; the only one where nothing is streamed."""
        chat = route.startswith("chat")
        body = {name: value for name, value in body.items() if value is not None} | {"model": self._model}
        try:
            if not stream:
                kind: Any = openai.types.chat.ChatCompletion if chat else openai.types.Completion
                whole: Any = await self._client.post(f"/{route}", body=body, cast_to=kind)
                yield whole, whole.usage
                return
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            chunk: Any = openai.types.chat.ChatCompletionChunk if chat else openai.types.Completion
            pieces: Any = await self._client.post(
                f"/{route}",
                body=body,
                cast_to=chunk,
                stream=True,
                stream_cls=openai.AsyncStream[chunk],
            )
            async for piece in pieces:
                yield piece, piece.usage
        except openai.BadRequestError as refusal:
            raise RefusedError(str(refusal)) from refusal


def _options(options: GenerateOptions) -> dict[str, Any]:
    """The options as HTTP has them; defaults are left out, as a user would."""
    body: dict[str, Any] = {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_k": options.top_k or None,
        "top_p": options.top_p,
        "min_p": options.min_p or None,
        "seed": options.seed,
        "repetition_penalty": options.repetition_penalty if options.repetition_penalty != 1 else None,
        "presence_penalty": options.presence_penalty or None,
        "frequency_penalty": options.frequency_penalty or None,
        "logit_bias": {str(token_id): bias for token_id, bias in options.logit_bias.items()} or None,
        "stop": list(options.stop) or None,
        "stop_token_ids": list(options.stop_token_ids) or None,
        "ignore_eos": options.ignore_eos or None,
        "min_tokens": options.min_tokens or None,
        "n": options.n,
        "best_of": options.best_of,
        "timeout": options.timeout_s,
        "return_token_ids": True,
    }
    match options.guidance:
        case None:
            pass
        case guidance if guidance.kind is GuidanceKind.JSON_OBJECT:
            body["response_format"] = {"type": "json_object"}
        case guidance if guidance.kind is GuidanceKind.JSON_SCHEMA:
            schema = {"name": "answer", "schema": json.loads(guidance.text)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        case guidance if guidance.kind is GuidanceKind.REGEX:
            body["guided_regex"] = guidance.text
        case guidance if guidance.kind is GuidanceKind.CHOICES:
            body["guided_choice"] = list(guidance.choices)
        case guidance:
            body["guided_grammar"] = guidance.text
    return body
