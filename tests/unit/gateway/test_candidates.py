"""However tokens come in, what a client sees of an output is the same: text, tokens, log probabilities, end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.candidates import Candidate
from services.gateway.jobs import GenerateJob
from services.gateway.streams import News, OutputStream
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.stop_strings import StopStrings
from shared.clock import ManualClock
from shared.errors import OrcaError
from shared.ids import Handle, RequestId
from shared.messages import Ended, FinishReason, SamplingParams, TokenLogprobs, token_ids
from shared.status import StatusCode
from shared.text.byte_tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.generation import Delta

STOP_ID = 100
WORDS = [
    *(b"", b" ", b" a", b"a", b"ab", b"!", b"!!", "é".encode(), b"\xc3", b"\xa9", b"\xa9b", "字".encode(), b"\xe5\xad"),
    *(
        b"\x97",
        "👩".encode(),
        b"\xf0\x9f",
        b"\x91\xa9",
        "\u200d🚀".encode(),
        "e\u0301".encode(),
        b"\xcc",
        b"\x81",
        b"\xff",
    ),
]


class WordTokenizer(ByteTokenizer):
    def __init__(self, *, strips_leading_space: bool) -> None:
        super().__init__(300)
        self.strips_leading_space = strips_leading_space

    def token_bytes(self, token_id: int) -> bytes:
        return WORDS[token_id] if token_id < len(WORDS) else b"stop"

    def decode(self, token_ids: Sequence[int]) -> str:
        text = super().decode(token_ids)
        return text.removeprefix(" ") if self.strips_leading_space else text


def candidate(
    tokenizer: ByteTokenizer,
    *,
    stops: Sequence[str] = (),
    min_tokens: int = 0,
    num_logprobs: int | None = None,
) -> tuple[Candidate, list[OutputStream]]:
    """An output, and where the sequences go that it cancels."""
    job = GenerateJob(
        request_id=RequestId("r"),
        model="m",
        prompt_token_ids=token_ids([1]),
        max_tokens=99,
        sampling=SamplingParams(num_logprobs=num_logprobs),
        stop_token_ids=frozenset({STOP_ID}),
        received_ns=0,
    )
    cancelled: list[OutputStream] = []
    stream = OutputStream(Handle(1), job, ManualClock(), News(), 0)
    detokenizer = Detokenizer(tokenizer, StopStrings(stops), min_tokens=min_tokens)
    return Candidate(3, stream, tokenizer, detokenizer, cancel=cancelled.append), cancelled


def run(output: Candidate, ids: list[int], cuts: set[int], reason: FinishReason) -> list[Delta]:
    """Push tokens, with a look after each of some; the scheduler's end comes with the last one."""
    deltas = []
    for index, token_id in enumerate(ids):
        scores = TokenLogprobs(-float(token_id), ((0, -0.5),)) if output.stream.job.sampling.num_logprobs else None
        output.stream.push(token_id, scores)
        if index == len(ids) - 1:
            output.stream.end(Ended(Handle(1), reason))
        if index in cuts or index == len(ids) - 1:
            deltas.append(output.advance())
    if output.finish is None:
        deltas.append(output.advance())
    assert output.advance() is None
    return [delta for delta in deltas if delta is not None]


@given(
    ids=st.lists(st.integers(0, len(WORDS) - 1), max_size=25),
    ends_by_token=st.booleans(),
    stops=st.lists(st.text("ab! é字👩\u0301", min_size=1, max_size=3), max_size=2),
    cuts=st.sets(st.integers(0, 25)),
    strips=st.booleans(),
    min_tokens=st.integers(0, 4),
    num_logprobs=st.sampled_from([None, 1]),
)
@settings(deadline=None, max_examples=300)
def test_streamed_is_unstreamed_is_decoded(
    ids: list[int],
    ends_by_token: bool,
    stops: list[str],
    cuts: set[int],
    strips: bool,
    min_tokens: int,
    num_logprobs: int | None,
) -> None:
    ids = [*ids, *([STOP_ID] if ends_by_token or not ids else [])]
    reason = FinishReason.STOP if ids[-1] == STOP_ID else FinishReason.LENGTH
    tokenizer = WordTokenizer(strips_leading_space=strips)
    results = []
    for looks in (cuts, set[int]()):
        output, cancelled = candidate(tokenizer, stops=stops, min_tokens=min_tokens, num_logprobs=num_logprobs)
        deltas = run(output, ids, looks, reason)
        text = "".join(delta.text for delta in deltas)
        shown = [token_id for delta in deltas for token_id in delta.token_ids]
        finish = deltas[-1].finish
        assert finish is not None
        assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert {delta.choice for delta in deltas} == {3}
        assert finish.num_output_tokens == len(shown)
        assert shown == ids[: len(shown)]
        decoded = tokenizer.decode([token_id for token_id in shown if token_id != STOP_ID])
        if isinstance(finish.stop, str):
            assert decoded.startswith(text + finish.stop)
            assert len(cancelled) <= 1
        else:
            assert (text, shown, cancelled) == (decoded, ids, [])
            assert finish.stop == (STOP_ID if reason is FinishReason.STOP else None)
        assert finish.reason is (reason if finish.stop is None else FinishReason.STOP)
        for delta in deltas:
            assert len(delta.logprobs) == (0 if num_logprobs is None else len(delta.token_ids))
        entries = [entry for delta in deltas for entry in delta.logprobs]
        if num_logprobs is not None:
            assert [(entry.token_id, entry.logprob) for entry in entries] == [(each, -float(each)) for each in shown]
            assert b"".join(entry.token_bytes for entry in entries).decode(errors="replace") == text
        results.append((text, shown, finish.stop, finish.reason, entries))
    assert results[0] == results[1]


def test_a_failure_is_raised_even_with_text_before_it() -> None:
    output, _ = candidate(ByteTokenizer(300))
    output.stream.push(ord("a"))
    output.stream.end(Ended(Handle(1), FinishReason.ERROR, StatusCode.UNAVAILABLE, "gone"))
    with pytest.raises(OrcaError, match="gone"):
        output.advance()


def test_what_fails_after_the_stop_string_is_no_matter() -> None:
    output, cancelled = candidate(ByteTokenizer(300), stops=["!"])
    for token_id in b"a!b":
        output.stream.push(token_id)
    delta = output.advance()
    assert delta is not None
    assert (delta.text, delta.token_ids, delta.finish) == ("a", (97, 33), None)
    assert cancelled == [output.stream]
    output.stream.push(99)
    assert output.advance() is None
    output.stream.end(Ended(Handle(1), FinishReason.ERROR, StatusCode.UNAVAILABLE, "gone"))
    last = output.advance()
    assert last is not None
    assert last.finish is not None
    assert (last.text, last.finish.reason, last.finish.stop) == ("", FinishReason.STOP, "!")
    assert last.finish.num_output_tokens == 2
