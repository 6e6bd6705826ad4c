"""One output of a request, from the tokens of its sequence to what the client sees of it.

Knows how an output ends: by a stop string or by the only call of a tool that it may have, which are found here and
cancel the sequence, by a token or the limit, which the scheduler finds, or by a failure, which never looks like one of
these. Does not wait: `News` says when to look.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from services.gateway.echo import MAX_ENTRIES
from services.gateway.logprobs import token_logprob
from shared.errors import ProtocolError
from shared.generation import Delta, Finish
from shared.messages import FinishReason
from shared.rpc import error_of
from shared.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from services.gateway.streams import OutputStream
    from services.gateway.text.detokenizer import Detokenizer
    from services.gateway.text.tool_calls import ToolCallParser
    from shared.generation import TokenLogprob, ToolCallDelta
    from shared.messages import Ended, TokenLogprobs
    from shared.text.tokenizer import Tokenizer

__all__ = ["Candidate"]


class Candidate:
    """An output while it is being generated; ``echo`` gives the deltas of its prompt, which come first."""

    def __init__(
        self,
        index: int,
        stream: OutputStream,
        tokenizer: Tokenizer,
        detokenizer: Detokenizer,
        *,
        cancel: Callable[[OutputStream], None],
        echo: Iterator[Delta] | None = None,
        tool_calls: ToolCallParser | None = None,
    ) -> None:
        self.index = index
        self.stream = stream
        self.finish: Finish | None = None
        """How it ended."""
        self.num_output_tokens = 0
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._cancel = cancel
        self._echo = echo
        self._tool_calls = tool_calls
        self._has_tool_calls = False
        self._stop: str | int | None = None
        self._is_over = False
        """The output has ended, whatever still comes of its sequence."""
        num_logprobs = stream.job.sampling.num_logprobs
        self._has_logprobs = num_logprobs is not None
        self._most = None if num_logprobs is None else max(1, MAX_ENTRIES // (1 + num_logprobs))
        """Tokens of one delta; log probabilities are heavy."""
        if tool_calls is not None and tool_calls.only_one:
            self._most = 1  # it ends with the token that completes the call, however tokens come in
        self._logprobs: deque[TokenLogprobs] = deque()
        """Of the tokens that the detokenizer holds back."""

    def advance(self) -> Delta | None:
        """Return what is new, None where there is nothing to show. Raises the error that the output ended with."""
        if self.finish is not None:
            return None
        if self._echo is not None:
            return self._advance_echo()
        new, logprobs, ended = self.stream.take(self._most)
        if self._is_over:
            return None if ended is None else self._delta("", [], [], ended)
        self._logprobs.extend(logprobs)
        # A stop token is an id of the output, not text of it.
        stop_id = new.pop() if new and new[-1] in self.stream.job.stop_token_ids else None
        text, ids, parts = self._detokenizer.push(new)
        if self._detokenizer.stop is not None:
            self._stop = self._detokenizer.stop
            self._end(ended)
        else:
            if ended is not None:
                _check_failure(ended)
            if ended is not None or stop_id is not None:
                rest = self._detokenizer.finish()
                text, ids, parts = text + rest.text, ids + rest.token_ids, parts + rest.token_bytes
            if stop_id is not None:
                self._stop = stop_id
                ids.append(stop_id)
                parts.append(b"")
        return self._delta(text, ids, parts, ended)

    def _advance_echo(self) -> Delta | None:
        if not self.stream.is_scored:
            if self.stream.ended is not None:
                _check_failure(self.stream.ended)
                raise ProtocolError("the request ended before the log probabilities of its prompt were there")
            return None
        assert self._echo is not None
        delta = next(self._echo, None)
        if delta is not None:
            self.stream.tell()  # more of it, or the output behind it
            return delta
        self._echo = None
        return self.advance()

    def _end(self, ended: Ended | None) -> None:
        self._is_over = True
        if ended is None:
            self._cancel(self.stream)

    def _delta(self, text: str, ids: list[int], parts: list[bytes], ended: Ended | None) -> Delta | None:
        calls: tuple[ToolCallDelta, ...] = ()
        if self._tool_calls is not None:
            text, calls = self._parse(self._tool_calls, text, final=ended is not None)
            if self._tool_calls.is_over and not self._is_over:
                rest = self._detokenizer.finish()  # of the token that completed the call
                ids, parts = ids + rest.token_ids, parts + rest.token_bytes
                self._end(ended)
        self.num_output_tokens += len(ids)
        logprobs = self._entries(ids, parts) if self._has_logprobs else ()
        if ended is not None:
            self.finish = self._finish(ended)
        elif not (text or ids or calls):
            return None
        return Delta(text, tuple(ids), self.finish, "", self.index, logprobs, tool_calls=calls)

    def _entries(self, ids: list[int], parts: list[bytes]) -> tuple[TokenLogprob, ...]:
        return tuple(
            token_logprob(self._tokenizer, token_id, part, self._logprobs.popleft())
            for token_id, part in zip(ids, parts, strict=True)
        )

    def _parse(self, parser: ToolCallParser, text: str, *, final: bool) -> tuple[str, tuple[ToolCallDelta, ...]]:
        text, calls = parser.push(text)
        if final:
            rest, more = parser.finish()
            text, calls = text + rest, calls + more
        self._has_tool_calls |= bool(calls)
        return text, calls

    def _finish(self, ended: Ended) -> Finish:
        timings = self.stream.timings(ended)
        reason = FinishReason.STOP if self._is_over else ended.reason
        if self._has_tool_calls and reason is FinishReason.STOP:
            reason = FinishReason.TOOL_CALLS
        return Finish(
            reason=reason,
            num_output_tokens=self.num_output_tokens,
            queue_ms=timings.queue_ns / 1e6,
            prefill_ms=timings.prefill_ns / 1e6,
            decode_ms=timings.decode_ns / 1e6,
            num_cached_tokens=ended.num_cached_tokens,
            num_preemptions=ended.num_preemptions,
            stop=self._stop,
        )


def _check_failure(ended: Ended) -> None:
    """Raise the error of a sequence that failed."""
    if ended.reason is FinishReason.ERROR:
        raise error_of(ended.error_code, ended.error_message or "the request failed in the engine")
    if ended.reason is FinishReason.CANCELLED:
        raise error_of(StatusCode.CANCELLED, ended.error_message or "the request was cancelled")
