"""A request's way through the gateway: check, wait for a place, tokenize, submit, and give what comes back.

All public APIs of the gateway are thin translations of this module. It does not know gRPC: giving up an iterator of
deltas is what cancels a request.

A request with a deadline is never anywhere beyond it: up to its first delta a timeout is around all that it waits for,
later a timer frees what it has in the engine, whatever its reader does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING

from services.gateway.admission import (
    check_options,
    check_text,
    check_vocabulary,
    count_candidates,
    num_utf8_bytes,
    parse_request_id,
)
from services.gateway.best_of import BestOf
from services.gateway.candidates import Candidate
from services.gateway.clients import calling_client
from services.gateway.deadline import first_deadline
from services.gateway.echo import echoed_prompt
from services.gateway.jobs import JobTerms, build_jobs
from services.gateway.observation import RequestRecord
from services.gateway.prompt_sources import Completion, Conversation
from services.gateway.response import Response
from services.gateway.streams import News
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.prompts import encode_text
from services.gateway.text.stop_strings import StopStrings
from shared.errors import OrcaError
from shared.generation import Delta, GatewayStatus, ModelInfo
from shared.status import StatusCode
from shared.tracing import calling_traceparent

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from services.gateway.clients import Client
    from services.gateway.deadline import Deadline
    from services.gateway.guidance import GuidanceCompiler
    from services.gateway.jobs import GenerateJob
    from services.gateway.observation import RequestObserver
    from services.gateway.prompt_sources import PreparedPrompts, PromptSource
    from services.gateway.readiness import Readiness
    from services.gateway.request_limit import RequestLimit
    from services.gateway.scheduler_client import SchedulerClient
    from services.gateway.served_model import ServedModel
    from services.gateway.streams import OutputStream
    from shared.clock import Clock
    from shared.generation import ChatRequest, GenerateRequest

__all__ = ["Generation"]

_BYTES_PER_TOKEN = 4
"""Of ordinary text, about: what a request will cost is guessed by it before it is tokenized."""


class Generation:
    """Serves requests, at most as many at once as ``limit`` allows."""

    def __init__(
        self,
        scheduler: SchedulerClient,
        readiness: Readiness,
        limit: RequestLimit,
        clock: Clock,
        guidance: GuidanceCompiler,
        observers: Sequence[RequestObserver] = (),
    ) -> None:
        self._scheduler = scheduler
        self._readiness = readiness
        self._limit = limit
        self._clock = clock
        self._guidance = guidance
        self._observers = observers

    def generate(self, request: GenerateRequest, *, call_timeout_s: float | None = None) -> AsyncGenerator[Delta, None]:
        """Continue prompts. ``call_timeout_s`` is what the call that carries the request has left.

        The first delta says that the request was accepted; all that can be known before is an error before it. The
        last one has the usage.

        Raises:
            InvalidRequestError: it can never succeed as it is.
            OverloadedError: gateway or scheduler are full.
            UnavailableError: the scheduler, the engine or the tokenizer is not there (yet), or the gateway is leaving.
            DeadlineExceededError: it took longer than ``timeout_s``, or than its call may take.
            OrcaError: the engine failed.
        """
        return self._serve(Completion(request), calling_client(), call_timeout_s)

    def chat(self, request: ChatRequest, *, call_timeout_s: float | None = None) -> AsyncGenerator[Delta, None]:
        """Answer a conversation; all else as in ``generate``."""
        return self._serve(Conversation(request), calling_client(), call_timeout_s)

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""
        num_bytes = num_utf8_bytes("text", text)
        check_text("text", num_bytes, self._readiness.require().engine)
        async with self._limit.slots(calling_client(), cost=num_bytes / _BYTES_PER_TOKEN, num_bytes=num_bytes):
            model = self._readiness.require(accepted=True)
            return await asyncio.to_thread(
                encode_text, model.text.tokenizer, text, add_special_tokens=add_special_tokens
            )

    async def tokenize_conversation(self, request: ChatRequest) -> list[int]:
        """Return the token ids of a conversation as the model would read it."""
        source = Conversation(request)
        num_bytes = source.check(self._readiness.require())
        async with self._limit.slots(calling_client(), cost=num_bytes / _BYTES_PER_TOKEN, num_bytes=num_bytes):
            prepared = await source.prepare(self._readiness.require())
            return list(prepared.prompts[0].token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        num_tokens = len(token_ids)
        check_vocabulary("token_ids", token_ids, self._readiness.require().engine)
        num_bytes = _BYTES_PER_TOKEN * num_tokens
        async with self._limit.slots(calling_client(), cost=num_tokens, num_bytes=num_bytes):
            model = self._readiness.require(accepted=True)
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
        self, source: PromptSource, client: Client, call_timeout_s: float | None
    ) -> AsyncGenerator[Delta, None]:
        loop = asyncio.get_running_loop()
        deadline = first_deadline(loop.time(), source.options.timeout_s, call_timeout_s)
        record = RequestRecord(source.method, client.name, self._clock.now_ns(), calling_traceparent())
        for observer in self._observers:
            observer.received(record)
        try:
            async with contextlib.AsyncExitStack() as stack:
                response = await self._accept(source, client, deadline, record, stack)
                prompts = response.prompt_token_ids() if source.returns_prompts else ()
                yield Delta(request_id=record.request_id, prompt_token_ids=prompts)
                while not response.is_done:
                    deltas = await response.take()
                    self._tell_of_tokens(deltas, record)
                    for delta in deltas:
                        yield delta
                record.code = StatusCode.OK
        except OrcaError as error:
            record.code = error.code
            raise
        except Exception:
            record.code = StatusCode.INTERNAL
            raise
        except BaseException:
            if deadline is not None and deadline.has_ended_call(loop.time()):
                record.code = StatusCode.DEADLINE_EXCEEDED
            raise
        finally:
            record.ended_ns = self._clock.now_ns()
            for observer in self._observers:
                observer.ended(record)

    def _tell_of_tokens(self, deltas: Sequence[Delta], record: RequestRecord) -> None:
        counts = [len(delta.token_ids) for delta in deltas if delta.token_ids and not delta.is_prompt]
        if not counts:
            return
        now_ns = self._clock.now_ns()
        if record.first_token_ns is None:
            record.first_token_ns = now_ns
            for observer in self._observers:
                observer.first_token(record)
        else:
            # Outputs advance side by side: the longest delta says how many steps passed.
            interval_ns, num_tokens = (now_ns - record.last_token_ns) // max(counts), sum(counts)
            for observer in self._observers:
                observer.more_tokens(interval_ns, num_tokens)
        record.last_token_ns = now_ns

    async def _accept(
        self,
        source: PromptSource,
        client: Client,
        deadline: Deadline | None,
        record: RequestRecord,
        stack: contextlib.AsyncExitStack,
    ) -> Response:
        """Do all that comes before the first delta; what must be undone at the end goes onto the stack."""
        options = source.options
        record.request_id = parse_request_id(source.request_id)
        num_candidates = count_candidates(options, source.num_prompts)
        model = self._readiness.require()
        check_options(options, model.engine, echo=source.echo)
        num_bytes = source.check(model)
        waiting_for = "a place"
        try:
            async with asyncio.timeout_at(None if deadline is None else deadline.at_s) as timeout:
                slots = self._limit.slots(
                    client, num_candidates, cost=num_bytes / _BYTES_PER_TOKEN, num_bytes=num_bytes
                )
                place = await stack.enter_async_context(slots)
                model = self._readiness.require(accepted=True)  # it may be another one by now
                waiting_for = "its prompt to be tokenized"
                prepared = await source.prepare(model)
                waiting_for = "its guidance to be checked"
                grammar = await self._guidance.compile(options, model, prepared.tools)
        except TimeoutError:
            if deadline is None or not timeout.expired():
                raise
            raise deadline.missed(f" while it waited for {waiting_for}") from None
        terms = JobTerms(
            request_id=parse_request_id(record.request_id),
            engine=model.engine,
            eos_token_ids=model.text.tokenizer.eos_token_ids,
            default_max_tokens=source.default_max_tokens,
            received_ns=record.received_ns,
            traceparent=record.traceparent,
            echo=source.echo,
            grammar=grammar,
        )
        response = self._submit(build_jobs(prepared.prompts, options, terms), prepared, source, model)
        stack.callback(response.close)

        @stack.callback
        def account() -> None:
            usage = response.usage()
            record.num_output_tokens = usage.num_output_tokens
            record.finishes = response.finishes
            place.spent = usage.num_prompt_tokens + usage.num_output_tokens

        record.num_prompt_tokens = response.usage().num_prompt_tokens
        if deadline is not None:
            timer = asyncio.get_running_loop().call_at(deadline.at_s, _expire, response, deadline)
            stack.callback(timer.cancel)
        return response

    def _submit(
        self, jobs: Sequence[GenerateJob], prepared: PreparedPrompts, source: PromptSource, model: ServedModel
    ) -> Response:
        options, prompts, tools = source.options, prepared.prompts, prepared.tools
        tokenizer = model.text.tokenizer
        stops = StopStrings(options.stop)
        num_per_prompt = len(jobs) // len(prompts)

        def candidate(index: int, stream: OutputStream) -> Candidate:
            echo = None
            if source.echo:
                # Nothing predicts a single token: that takes no engine.
                logprobs = None if options.num_logprobs is None else stream.prompt_logprobs or [None]
                prompt = prompts[index // num_per_prompt]
                echo = echoed_prompt(prompt, index, tokenizer, logprobs, options.num_logprobs or 0)
                stream.tell()
            detokenizer = Detokenizer(
                tokenizer,
                stops,
                min_tokens=options.min_tokens,
                # Guidance is to the letter; elsewhere SentencePiece's first space is its own.
                continues=source.continues or bool(stream.job.grammar),
                markers=None if tools is None else tools.markers,
            )
            return Candidate(
                index,
                stream,
                tokenizer,
                detokenizer,
                cancel=self._scheduler.cancel,
                echo=echo,
                tool_calls=None if tools is None else tools.parser(),
            )

        best_of = None
        if num_per_prompt > options.n:
            best_of = BestOf(n=options.n, best_of=num_per_prompt, shows_logprobs=options.num_logprobs is not None)
        news = News()
        candidates = [candidate(index, stream) for index, stream in enumerate(self._scheduler.open(jobs, news))]
        return Response(candidates, news, self._scheduler, num_per_prompt=num_per_prompt, best_of=best_of)


def _expire(response: Response, deadline: Deadline) -> None:
    response.fail(deadline.missed(f"; {response.usage().num_output_tokens} tokens of output were there"))
