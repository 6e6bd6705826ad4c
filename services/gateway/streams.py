"""The outputs of the requests in service: tokens come in by handle, each request's handler takes them out.

An output keeps all its tokens, since a request that is submitted again starts from them; what the handler has not taken
yet is a tail of that column. Thus a slow client costs no more memory than its own ``max_tokens``, and it gets all that
piled up at once. Knows neither gRPC nor text.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.ids import Handle
from shared.messages import Ended, FinishReason, token_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.gateway.admission import GenerateJob
    from shared.clock import Clock
    from shared.messages import SessionEvents
    from shared.status import StatusCode

__all__ = ["OutputStream", "StreamTable", "Timings"]


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went, from the gateway's receipt on."""

    queue_ns: int
    prefill_ns: int
    decode_ns: int


class OutputStream:
    """The output of one request, written by the session's reader and read by the request's handler."""

    def __init__(self, handle: Handle, job: GenerateJob, clock: Clock) -> None:
        self.handle = handle
        self.job = job
        self.output_token_ids = token_ids()
        self.ended: Ended | None = None
        self._clock = clock
        self._num_taken = 0
        self._some = asyncio.Event()
        self._submitted_ns = clock.now_ns()
        self._first_token_ns: int | None = None
        self._ended_ns = 0
        self._resumed = False

    def push(self, token_id: int) -> None:
        """Append a token."""
        if self._first_token_ns is None:
            self._first_token_ns = self._clock.now_ns()
        self.output_token_ids.append(token_id)
        self._some.set()

    def end(self, ended: Ended) -> None:
        """No more tokens will come; only the first end counts."""
        if self.ended is None:
            self.ended = ended
            self._ended_ns = self._clock.now_ns()
            self._some.set()

    async def take(self) -> tuple[list[int], Ended | None]:
        """Wait for news; return the tokens since the last call, and the end once all tokens are taken."""
        await self._some.wait()
        self._some.clear()
        new = self.output_token_ids[self._num_taken :].tolist()
        self._num_taken += len(new)
        return new, self.ended

    def resubmitted(self) -> None:
        """Take note that the request goes to a scheduler again, which knows nothing of its past."""
        if self._first_token_ns is None:
            self._submitted_ns = self._clock.now_ns()
        else:
            self._resumed = True

    def complete(self) -> Ended | None:
        """Return the end that the tokens themselves tell, None when more must come."""
        if self.output_token_ids and self.output_token_ids[-1] in self.job.stop_token_ids:
            return Ended(self.handle, FinishReason.STOP)
        if len(self.output_token_ids) >= self.job.max_tokens:
            return Ended(self.handle, FinishReason.LENGTH)
        return None

    def timings(self, ended: Ended) -> Timings:
        """Return where the time went."""
        before_ns = self._submitted_ns - self.job.received_ns
        if self._first_token_ns is None or not self._resumed:
            return Timings(before_ns + ended.queue_ns, ended.prefill_ns, ended.decode_ns)
        # The first scheduler took its knowledge along: count from here, its queue time as prefill.
        return Timings(before_ns, self._first_token_ns - self._submitted_ns, self._ended_ns - self._first_token_ns)


class StreamTable:
    """All requests in service, by handle. Handles are never used again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._streams: dict[Handle, OutputStream] = {}
        self._handles = map(Handle, itertools.count(1))

    def open(self, job: GenerateJob) -> OutputStream:
        """Add a request."""
        stream = OutputStream(next(self._handles), job, self._clock)
        self._streams[stream.handle] = stream
        return stream

    def close(self, stream: OutputStream) -> None:
        """Forget a request; what still comes for it is ignored."""
        self._streams.pop(stream.handle, None)

    def deliver(self, events: SessionEvents) -> None:
        """Distribute one message of events."""
        streams = self._streams
        for handle, token_id in zip(events.token_handles, events.token_ids, strict=True):
            stream = streams.get(handle)
            if stream is not None:
                stream.push(token_id)
        for ended in events.ended:
            stream = streams.get(ended.handle)
            if stream is not None:
                stream.end(ended)

    def unfinished(self) -> Iterator[OutputStream]:
        """Give the requests that have not ended, in order of arrival."""
        return (stream for stream in list(self._streams.values()) if stream.ended is None)

    def fail_all(self, code: StatusCode, message: str) -> None:
        """End all that is unfinished with an error."""
        for stream in self.unfinished():
            stream.end(Ended(stream.handle, FinishReason.ERROR, code, message))
