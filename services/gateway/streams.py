"""The sequences in service: tokens come in by handle, each request's handler takes them out.

A stream keeps all its tokens, since a sequence that is submitted again starts from them; what the handler has not taken
yet is a tail of that column. Thus a slow client costs no more memory than its own ``max_tokens``, and it gets all that
piled up at once. Knows neither gRPC nor text.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.errors import ProtocolError
from shared.ids import Handle
from shared.messages import Ended, FinishReason, token_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.gateway.jobs import GenerateJob
    from shared.clock import Clock
    from shared.errors import OrcaError
    from shared.messages import PromptLogprobs, SessionEvents, TokenLogprobs
    from shared.status import StatusCode

__all__ = ["News", "OutputStream", "StreamTable", "Timings"]


class News:
    """Which candidates of one request have something new; one handler reads it."""

    __slots__ = ("_failure", "_keys", "_waiter")

    def __init__(self) -> None:
        self._keys: dict[int, None] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._failure: OrcaError | None = None

    def tell(self, key: int) -> None:
        """Candidate ``key`` has something new."""
        self._keys[key] = None
        self._wake()

    def fail(self, failure: OrcaError) -> None:
        """The request is over: whoever reads gets this error."""
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> dict[int, None]:
        """Wait for news and take all there are, in the order in which they came."""
        if not self._keys and self._failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._failure is not None:
            raise self._failure
        keys, self._keys = self._keys, {}
        return keys


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a sequence's time went, from the gateway's receipt on."""

    queue_ns: int
    prefill_ns: int
    decode_ns: int


class OutputStream:
    """The output of one sequence, written by the session's reader and read by the request's handler."""

    __slots__ = (
        "_clock",
        "_ended_ns",
        "_first_token_ns",
        "_key",
        "_logprobs",
        "_news",
        "_num_taken",
        "_num_unscored",
        "_own_timings",
        "_submitted_ns",
        "cancelled",
        "ended",
        "handle",
        "job",
        "output_token_ids",
        "prompt_logprobs",
    )

    def __init__(self, handle: Handle, job: GenerateJob, clock: Clock, news: News, key: int) -> None:
        """``news`` is told of everything that comes, as of candidate ``key``."""
        self.handle = handle
        self.job = job
        self.output_token_ids = token_ids()
        self.ended: Ended | None = None
        self.cancelled = False
        """The scheduler has been told that nobody waits for more tokens."""
        num_scores = 0 if job.num_prompt_logprobs is None else len(job.prompt_token_ids)
        self.prompt_logprobs: list[TokenLogprobs | None] = [None] * num_scores
        """Of each token of the prompt, where asked for; nothing predicts the first one."""
        self._num_unscored = max(0, num_scores - 1)
        self._logprobs: list[TokenLogprobs] | None = None if job.sampling.num_logprobs is None else []
        """Of the tokens that have not been taken."""
        self._clock = clock
        self._news = news
        self._key = key
        self._num_taken = 0
        self._submitted_ns = clock.now_ns()
        self._first_token_ns: int | None = None
        self._ended_ns = 0
        self._own_timings = False
        """What the scheduler tells of time is not the whole story."""

    def tell(self) -> None:
        """Have the handler look."""
        self._news.tell(self._key)

    @property
    def is_scored(self) -> bool:
        """Whether all that was asked for of the prompt's log probabilities is there."""
        return self._num_unscored == 0

    def push(self, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        """Append a token. Raises ``ProtocolError`` where its log probability is missing."""
        if self._logprobs is not None:
            if logprobs is None:
                raise ProtocolError("a token came without its log probability")
            self._logprobs.append(logprobs)
        if self._first_token_ns is None:
            self._first_token_ns = self._clock.now_ns()
        self.output_token_ids.append(token_id)
        self._news.tell(self._key)

    def push_prompt_logprobs(self, piece: PromptLogprobs) -> None:
        """Take note of a piece of the prompt; a place may come again. Raises ``ProtocolError`` beyond the prompt."""
        end = piece.first_position + len(piece.tokens)
        if piece.first_position < 1 or end > len(self.prompt_logprobs):
            raise ProtocolError(f"log probabilities came for places up to {end} of a prompt that has none there")
        for position, logprobs in enumerate(piece.tokens, piece.first_position):
            self._num_unscored -= self.prompt_logprobs[position] is None
            self.prompt_logprobs[position] = logprobs
        if self.is_scored:
            self._news.tell(self._key)

    def end(self, ended: Ended) -> None:
        """No more tokens will come; only the first end counts."""
        if self.ended is None:
            self.ended = ended
            self._ended_ns = self._clock.now_ns()
            self._news.tell(self._key)

    def end_alone(self) -> None:
        """End a cancelled sequence without the scheduler's word, which would tell where its time went."""
        if self.ended is None:
            self._own_timings = True
            self.end(Ended(self.handle, FinishReason.CANCELLED))

    def take(self, most: int | None = None) -> tuple[list[int], list[TokenLogprobs], Ended | None]:
        """Return the tokens since the last call, their log probabilities where asked for, and the end after the last.

        With ``most``, no more tokens than that; the rest is news of its own.
        """
        begin = self._num_taken
        new = self.output_token_ids[begin : None if most is None else begin + most].tolist()
        self._num_taken += len(new)
        logprobs: list[TokenLogprobs] = []
        if self._logprobs is not None:
            logprobs, self._logprobs = self._logprobs[: len(new)], self._logprobs[len(new) :]
        if self._num_taken < len(self.output_token_ids):
            self._news.tell(self._key)
            return new, logprobs, None
        return new, logprobs, self.ended

    def resubmitted(self) -> None:
        """Take note that the sequence goes to a scheduler again, which knows nothing of its past."""
        if self._first_token_ns is None:
            self._submitted_ns = self._clock.now_ns()
        else:
            self._own_timings = True

    def complete(self) -> Ended | None:
        """Return the end that the tokens themselves tell, None when more must come."""
        if not self.is_scored:
            return None
        if self.output_token_ids and self.output_token_ids[-1] in self.job.stop_token_ids:
            return Ended(self.handle, FinishReason.STOP)
        if len(self.output_token_ids) >= self.job.max_tokens:
            return Ended(self.handle, FinishReason.LENGTH)
        return None

    def timings(self, ended: Ended) -> Timings:
        """Return where the time went."""
        before_ns = self._submitted_ns - self.job.received_ns
        if self._first_token_ns is None or not self._own_timings:
            return Timings(before_ns + ended.queue_ns, ended.prefill_ns, ended.decode_ns)
        # The scheduler that knew is gone, or slow to answer: count from here, its queue time as prefill.
        return Timings(before_ns, self._first_token_ns - self._submitted_ns, self._ended_ns - self._first_token_ns)


class StreamTable:
    """All sequences in service, by handle. Handles are never used again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._streams: dict[Handle, OutputStream] = {}
        self._handles = map(Handle, itertools.count(1))

    def open(self, job: GenerateJob, news: News, key: int) -> OutputStream:
        """Add a sequence; ``news`` is told of what comes for it, as of ``key``."""
        stream = OutputStream(next(self._handles), job, self._clock, news, key)
        self._streams[stream.handle] = stream
        return stream

    def close(self, stream: OutputStream) -> bool:
        """Forget a sequence; what still comes for it is ignored. Return whether it was there."""
        return self._streams.pop(stream.handle, None) is not None

    def deliver(self, events: SessionEvents) -> None:
        """Distribute one message of events. Raises ``ProtocolError`` where something is missing."""
        streams = self._streams
        logprobs = events.token_logprobs
        for handle, piece in events.prompt_logprobs:
            stream = streams.get(handle)
            if stream is not None:
                stream.push_prompt_logprobs(piece)
        for index, (handle, token_id) in enumerate(zip(events.token_handles, events.token_ids, strict=True)):
            stream = streams.get(handle)
            if stream is not None:
                stream.push(token_id, logprobs.get(index))
        for ended in events.ended:
            stream = streams.get(ended.handle)
            if stream is not None:
                stream.end(ended)

    def unfinished(self) -> Iterator[OutputStream]:
        """Give the sequences that have not ended, in order of arrival."""
        return (stream for stream in list(self._streams.values()) if stream.ended is None)

    def fail_all(self, code: StatusCode, message: str) -> None:
        """End all that is unfinished with an error."""
        for stream in self.unfinished():
            stream.end(Ended(stream.handle, FinishReason.ERROR, code, message))
