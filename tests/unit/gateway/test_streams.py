from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.gateway.jobs import GenerateJob
from services.gateway.streams import News, OutputStream, StreamTable, Timings
from shared.clock import ManualClock
from shared.errors import ProtocolError, UnavailableError
from shared.ids import Handle, RequestId
from shared.messages import (
    Ended,
    FinishReason,
    PromptLogprobs,
    SamplingParams,
    SessionEvents,
    TokenLogprobs,
    token_ids,
)
from shared.status import StatusCode


def make_job(
    *,
    max_tokens: int = 8,
    received_ns: int = 0,
    num_prompt: int = 1,
    num_logprobs: int | None = None,
    num_prompt_logprobs: int | None = None,
) -> GenerateJob:
    return GenerateJob(
        request_id=RequestId("r"),
        model="m",
        prompt_token_ids=token_ids([1] * num_prompt),
        max_tokens=max_tokens,
        sampling=SamplingParams(num_logprobs=num_logprobs),
        stop_token_ids=frozenset({9}),
        received_ns=received_ns,
        num_prompt_logprobs=num_prompt_logprobs,
    )


def make_stream(clock: ManualClock | None = None, news: News | None = None, **job: Any) -> OutputStream:
    return OutputStream(Handle(1), make_job(**job), clock or ManualClock(), news or News(), 7)


async def test_tokens_pile_up_until_they_are_taken() -> None:
    table, news = StreamTable(ManualClock()), News()
    one, two = table.open(make_job(), news, 1), table.open(make_job(), news, 2)
    table.deliver(SessionEvents([one.handle, two.handle, one.handle], [10, 20, 11]))
    table.deliver(SessionEvents([one.handle], [12]))
    assert list(await news.take()) == [1, 2]
    assert one.take() == ([10, 11, 12], [], None)
    assert two.take() == ([20], [], None)
    ended = Ended(one.handle, FinishReason.LENGTH)
    table.deliver(SessionEvents([one.handle], [13], [ended]))
    assert list(await news.take()) == [1]
    assert one.take() == ([13], [], ended)
    assert one.output_token_ids.tolist() == [10, 11, 12, 13], "kept for submitting again"


async def test_taking_waits_for_news() -> None:
    news = News()
    taking = asyncio.ensure_future(news.take())
    done, _ = await asyncio.wait([taking], timeout=0)
    assert not done
    news.tell(5)
    news.tell(3)
    news.tell(5)
    assert list(await taking) == [5, 3]
    taking = asyncio.ensure_future(news.take())
    await asyncio.wait([taking], timeout=0)
    news.fail(UnavailableError("gone"))
    with pytest.raises(UnavailableError):
        await taking
    with pytest.raises(UnavailableError):
        await news.take()


async def test_a_reader_that_gives_up_leaves_the_news() -> None:
    news = News()
    taking = asyncio.ensure_future(news.take())
    await asyncio.wait([taking], timeout=0)
    news.tell(1)
    taking.cancel()
    await asyncio.wait([taking])
    assert list(await news.take()) == [1]


async def test_what_is_too_much_at_once_is_news_again() -> None:
    news = News()
    stream = make_stream(news=news, num_logprobs=0)
    ended = Ended(stream.handle, FinishReason.LENGTH)
    scores = [TokenLogprobs(-float(index)) for index in range(3)]
    for index, score in enumerate(scores):
        stream.push(index, score)
    stream.end(ended)
    await news.take()
    assert stream.take(2) == ([0, 1], scores[:2], None)
    assert list(await news.take()) == [7]
    assert stream.take(2) == ([2], scores[2:], ended)


def test_a_token_without_its_log_probability_is_refused() -> None:
    table = StreamTable(ManualClock())
    stream = table.open(make_job(num_logprobs=1), News(), 0)
    table.deliver(SessionEvents([Handle(9), stream.handle], [5, 6], token_logprobs={1: TokenLogprobs(-1.0)}))
    assert stream.take() == ([6], [TokenLogprobs(-1.0)], None)
    with pytest.raises(ProtocolError, match="without its log probability"):
        table.deliver(SessionEvents([stream.handle], [5]))


async def test_log_probabilities_of_a_prompt_come_in_pieces_some_of_them_twice() -> None:
    news = News()
    stream = make_stream(news=news, num_prompt=4, num_prompt_logprobs=0)
    scores = tuple(TokenLogprobs(-float(index)) for index in range(4))
    is_scored = [stream.is_scored]
    for first_position, tokens in ((1, scores[1:3]), (1, scores[1:2]), (2, scores[2:])):
        stream.push_prompt_logprobs(PromptLogprobs(first_position, tokens))
        is_scored.append(stream.is_scored)
    assert is_scored == [False, False, False, True]
    assert list(await news.take()) == [7]
    assert stream.prompt_logprobs == [None, *scores[1:]]
    for first_position, tokens in ((0, scores[:1]), (4, scores[:1]), (3, scores[:2])):
        with pytest.raises(ProtocolError, match="of a prompt"):
            stream.push_prompt_logprobs(PromptLogprobs(first_position, tokens))


@pytest.mark.parametrize(("num_prompt", "num_prompt_logprobs"), [(1, 3), (5, None)])
def test_a_prompt_that_nothing_is_asked_of_is_scored(num_prompt: int, num_prompt_logprobs: int | None) -> None:
    assert make_stream(num_prompt=num_prompt, num_prompt_logprobs=num_prompt_logprobs).is_scored


def test_unknown_and_closed_handles_are_ignored() -> None:
    table = StreamTable(ManualClock())
    stream = table.open(make_job(), News(), 0)
    assert table.close(stream)
    assert not table.close(stream)
    table.deliver(SessionEvents([stream.handle, Handle(77)], [1, 2], [Ended(stream.handle, FinishReason.STOP)]))
    assert stream.output_token_ids.tolist() == []
    assert stream.ended is None
    assert list(table.unfinished()) == []
    assert table.open(make_job(), News(), 0).handle != stream.handle


def test_only_the_first_end_counts() -> None:
    table = StreamTable(ManualClock())
    streams = [table.open(make_job(), News(), 0) for _ in range(3)]
    streams[1].end(Ended(streams[1].handle, FinishReason.STOP))
    assert list(table.unfinished()) == [streams[0], streams[2]]
    table.fail_all(StatusCode.UNAVAILABLE, "leaving")
    assert [stream.ended and stream.ended.reason.name for stream in streams] == ["ERROR", "STOP", "ERROR"]
    assert list(table.unfinished()) == []


def test_the_tokens_tell_whether_an_end_was_lost() -> None:
    stream = make_stream(max_tokens=3)
    assert stream.complete() is None
    stream.push(1)
    assert stream.complete() is None
    stream.push(9)
    assert stream.complete() == Ended(Handle(1), FinishReason.STOP)
    stream = make_stream(max_tokens=1)
    stream.push(1)
    assert stream.complete() == Ended(Handle(1), FinishReason.LENGTH)


def test_timings_of_an_undisturbed_request_are_the_schedulers() -> None:
    clock = ManualClock(100)
    stream = make_stream(clock, received_ns=70)
    ended = Ended(Handle(1), FinishReason.LENGTH, queue_ns=5, prefill_ns=6, decode_ns=7)
    stream.end(ended)
    assert stream.timings(ended) == Timings(queue_ns=35, prefill_ns=6, decode_ns=7)


def test_timings_of_a_request_resubmitted_before_its_first_token_count_the_loss_as_queueing() -> None:
    clock = ManualClock(100)
    stream = make_stream(clock, received_ns=70)
    clock.advance(1000)
    stream.resubmitted()
    stream.push(1)
    ended = Ended(Handle(1), FinishReason.LENGTH, queue_ns=5, prefill_ns=6, decode_ns=7)
    stream.end(ended)
    assert stream.timings(ended) == Timings(queue_ns=1035, prefill_ns=6, decode_ns=7)


def test_timings_of_a_request_resubmitted_in_its_output_are_the_gateways() -> None:
    clock = ManualClock(100)
    stream = make_stream(clock, received_ns=70)
    clock.advance(40)
    stream.push(1)
    clock.advance(1000)
    stream.resubmitted()
    clock.advance(10)
    stream.push(2)
    ended = Ended(Handle(1), FinishReason.LENGTH, queue_ns=5, prefill_ns=6, decode_ns=7)
    stream.end(ended)
    clock.advance(10**6)  # a slow client is not decoding
    assert stream.timings(ended) == Timings(queue_ns=30, prefill_ns=40, decode_ns=1010)


def test_a_cancelled_sequence_can_end_without_the_scheduler() -> None:
    clock = ManualClock(100)
    stream = make_stream(clock, received_ns=70)
    clock.advance(40)
    stream.push(1)
    clock.advance(5)
    stream.end_alone()
    stream.end(Ended(Handle(1), FinishReason.CANCELLED, queue_ns=1))
    assert stream.ended == Ended(Handle(1), FinishReason.CANCELLED)
    assert stream.timings(stream.ended) == Timings(queue_ns=30, prefill_ns=40, decode_ns=5)
