"""A request's way through the gateway: admit, tokenize, submit, and turn the tokens that come back into text.

All public APIs of the gateway are thin translations of this module. It does not know gRPC: giving up an iterator of
deltas is what cancels a request.

Tokenizing always runs in a thread: a long text takes the tokenizer for up to seconds, and even a short one may have to
wait for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

from services.gateway.admission import (
    DEFAULT_MAX_TOKENS,
    build_job,
    check_options,
    check_text,
    check_vocabulary,
    conversation_text_bytes,
    parse_request_id,
)
from services.gateway.clients import calling_client
from services.gateway.text.detokenizer import Detokenizer
from shared.errors import InvalidRequestError
from shared.generation import Delta, Finish, GatewayStatus, ModelInfo, Usage
from shared.log import get_logger
from shared.messages import FinishReason
from shared.rpc import error_of
from shared.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from services.gateway.readiness import Readiness
    from services.gateway.request_limit import RequestLimit
    from services.gateway.scheduler_client import SchedulerClient
    from services.gateway.served_model import ServedModel
    from services.gateway.streams import OutputStream
    from shared.clock import Clock
    from shared.generation import ChatRequest, GenerateOptions, GenerateRequest
    from shared.messages import Ended

__all__ = ["Generation"]

_BYTES_PER_TOKEN = 4
"""Of ordinary text, about: what a request will cost is guessed by it before it is tokenized."""


class Generation:
    """Serves requests, at most as many at once as ``limit`` allows."""

    def __init__(self, scheduler: SchedulerClient, readiness: Readiness, limit: RequestLimit, clock: Clock) -> None:
        self._scheduler = scheduler
        self._readiness = readiness
        self._limit = limit
        self._clock = clock

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Continue a prompt. Errors: those of admission and of `Readiness.require`, then the scheduler's."""

        def check(model: ServedModel) -> int:
            if not request.prompts:
                raise InvalidRequestError("prompts is empty; send at least one")
            prompt = request.prompts[0]
            if not isinstance(prompt, str):
                return _BYTES_PER_TOKEN * len(prompt)
            num_bytes = len(prompt.encode())
            check_text("text", num_bytes, model.engine)
            return num_bytes

        async def tokenize(model: ServedModel) -> Sequence[int]:
            prompt = request.prompts[0]
            if not isinstance(prompt, str):
                return prompt
            return await asyncio.to_thread(lambda: model.text.tokenizer.encode(prompt))

        return self._serve(check, tokenize, request.options, request.request_id, default_max_tokens=DEFAULT_MAX_TOKENS)

    def chat(self, request: ChatRequest) -> AsyncGenerator[Delta, None]:
        """Answer a conversation; errors as in ``generate``."""
        messages = request.messages

        def check(model: ServedModel) -> int:
            num_bytes = conversation_text_bytes(messages)
            check_text("messages", num_bytes, model.engine)
            return num_bytes

        async def tokenize(model: ServedModel) -> Sequence[int]:
            conversation = [dataclasses.asdict(message) for message in messages]

            def encode() -> list[int]:
                text = model.text.chat_template.render(conversation, add_generation_prompt=True)
                return model.text.tokenizer.encode(text, add_special_tokens=False)

            return await asyncio.to_thread(encode)

        return self._serve(check, tokenize, request.options, request.request_id, default_max_tokens=None)

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""
        num_bytes = len(text.encode())
        check_text("text", num_bytes, self._readiness.require().engine)
        async with self._limit.slots(calling_client(), cost=num_bytes / _BYTES_PER_TOKEN, num_bytes=num_bytes):
            model = self._readiness.require()
            return await asyncio.to_thread(
                lambda: model.text.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            )

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        num_tokens = len(token_ids)
        check_vocabulary("token_ids", token_ids, self._readiness.require().engine)
        num_bytes = _BYTES_PER_TOKEN * num_tokens
        async with self._limit.slots(calling_client(), cost=num_tokens, num_bytes=num_bytes):
            model = self._readiness.require()
            return await asyncio.to_thread(model.text.tokenizer.decode, token_ids)

    def model_info(self) -> ModelInfo:
        """Return the model that is served and its limits."""
        model = self._readiness.require()
        return ModelInfo(model.engine, tuple(sorted(model.text.tokenizer.eos_token_ids)), model.text.has_chat_template)

    async def status(self) -> GatewayStatus:
        """Return the engine's state, not ready where this gateway cannot serve it."""
        engine = await self._scheduler.engine_status()
        missing = self._readiness.missing()
        if engine.ready and missing is not None:
            engine = dataclasses.replace(engine, ready=False, reason=str(missing))
        return GatewayStatus(engine, self._limit.num_requests)

    async def _serve(
        self,
        check: Callable[[ServedModel], int],
        tokenize: Callable[[ServedModel], Awaitable[Sequence[int]]],
        options: GenerateOptions,
        request_id: str,
        *,
        default_max_tokens: int | None,
    ) -> AsyncGenerator[Delta, None]:
        received_ns = self._clock.now_ns()
        model = self._readiness.require()
        name = parse_request_id(request_id)
        check_options(options, model.engine)
        num_bytes = check(model)
        slots = self._limit.slots(calling_client(), cost=num_bytes / _BYTES_PER_TOKEN, num_bytes=num_bytes)
        async with slots as place:
            model = self._readiness.require()  # it may be another one by now
            job = build_job(
                name,
                await tokenize(model),
                options,
                model.engine,
                eos_token_ids=model.text.tokenizer.eos_token_ids,
                default_max_tokens=default_max_tokens,
                received_ns=received_ns,
            )
            stream = self._scheduler.open(job)
            try:
                yield Delta(request_id=job.request_id)
                detokenizer = Detokenizer(model.text.tokenizer)
                ended = None
                while ended is None:
                    new, ended = await stream.take()
                    # A stop token is an id of the output, not text of it.
                    stopped = bool(new) and new[-1] in job.stop_token_ids
                    text = detokenizer.push(new[:-1] if stopped else new).text
                    if ended is None:
                        yield Delta(text, tuple(new))
                finish = _finish(stream, ended)
                usage = Usage(len(job.prompt_token_ids), finish.num_output_tokens, finish.num_cached_tokens)
                yield Delta(text + detokenizer.finish().text, tuple(new), finish, usage=usage)
            finally:
                place.spent = len(job.prompt_token_ids) + len(stream.output_token_ids)
                self._scheduler.close_stream(stream)
                _log_end(stream)


def _finish(stream: OutputStream, ended: Ended) -> Finish:
    """Return how a request ended; raise where it failed."""
    if ended.reason is FinishReason.ERROR:
        raise error_of(ended.error_code, ended.error_message or "the request failed in the engine")
    if ended.reason is FinishReason.CANCELLED:
        raise error_of(StatusCode.CANCELLED, ended.error_message or "the request was cancelled")
    timings = stream.timings(ended)
    return Finish(
        reason=ended.reason,
        num_output_tokens=len(stream.output_token_ids),
        queue_ms=timings.queue_ns / 1e6,
        prefill_ms=timings.prefill_ns / 1e6,
        decode_ms=timings.decode_ns / 1e6,
        num_cached_tokens=ended.num_cached_tokens,
        num_preemptions=ended.num_preemptions,
    )


def _log_end(stream: OutputStream) -> None:
    reason = FinishReason.CANCELLED if stream.ended is None else stream.ended.reason
    get_logger().info(
        "request_ended",
        request_id=stream.job.request_id,
        reason=reason.name.lower(),
        num_prompt_tokens=len(stream.job.prompt_token_ids),
        num_output_tokens=len(stream.output_token_ids),
    )
