from __future__ import annotations

import asyncio

from services.gateway.admission import GenerateJob
from services.gateway.streams import OutputStream, StreamTable, Timings
from shared.clock import ManualClock
from shared.ids import Handle, RequestId
from shared.messages import Ended, FinishReason, SamplingParams, SessionEvents, token_ids
from shared.status import StatusCode


def make_job(*, max_tokens: int = 8, received_ns: int = 0) -> GenerateJob:
    return GenerateJob(
        request_id=RequestId("r"),
        model="m",
        prompt_token_ids=token_ids([1]),
        max_tokens=max_tokens,
        sampling=SamplingParams(),
        stop_token_ids=frozenset({9}),
        received_ns=received_ns,
    )


async def test_tokens_pile_up_until_they_are_taken() -> None:
    table = StreamTable(ManualClock())
    one, two = table.open(make_job()), table.open(make_job())
    table.deliver(SessionEvents([one.handle, two.handle, one.handle], [10, 20, 11]))
    table.deliver(SessionEvents([one.handle], [12]))
    assert await one.take() == ([10, 11, 12], None)
    assert await two.take() == ([20], None)
    ended = Ended(one.handle, FinishReason.LENGTH)
    table.deliver(SessionEvents([one.handle], [13], [ended]))
    assert await one.take() == ([13], ended)
    assert one.output_token_ids.tolist() == [10, 11, 12, 13], "kept for submitting again"


async def test_taking_waits_for_news() -> None:
    table = StreamTable(ManualClock())
    stream = table.open(make_job())
    taking = asyncio.ensure_future(stream.take())
    done, _ = await asyncio.wait([taking], timeout=0)
    assert not done
    stream.push(5)
    assert await taking == ([5], None)


def test_unknown_and_closed_handles_are_ignored() -> None:
    table = StreamTable(ManualClock())
    stream = table.open(make_job())
    table.close(stream)
    table.close(stream)
    table.deliver(SessionEvents([stream.handle, Handle(77)], [1, 2], [Ended(stream.handle, FinishReason.STOP)]))
    assert stream.output_token_ids.tolist() == []
    assert stream.ended is None
    assert list(table.unfinished()) == []
    assert table.open(make_job()).handle != stream.handle


def test_only_the_first_end_counts() -> None:
    table = StreamTable(ManualClock())
    streams = [table.open(make_job()) for _ in range(3)]
    streams[1].end(Ended(streams[1].handle, FinishReason.STOP))
    assert list(table.unfinished()) == [streams[0], streams[2]]
    table.fail_all(StatusCode.UNAVAILABLE, "leaving")
    assert [stream.ended and stream.ended.reason.name for stream in streams] == ["ERROR", "STOP", "ERROR"]
    assert list(table.unfinished()) == []


def test_the_tokens_tell_whether_an_end_was_lost() -> None:
    stream = OutputStream(Handle(1), make_job(max_tokens=3), ManualClock())
    assert stream.complete() is None
    stream.push(1)
    assert stream.complete() is None
    stream.push(9)
    assert stream.complete() == Ended(Handle(1), FinishReason.STOP)
    stream = OutputStream(Handle(1), make_job(max_tokens=1), ManualClock())
    stream.push(1)
    assert stream.complete() == Ended(Handle(1), FinishReason.LENGTH)


def test_timings_of_an_undisturbed_request_are_the_schedulers() -> None:
    clock = ManualClock(100)
    stream = OutputStream(Handle(1), make_job(received_ns=70), clock)
    ended = Ended(Handle(1), FinishReason.LENGTH, queue_ns=5, prefill_ns=6, decode_ns=7)
    stream.end(ended)
    assert stream.timings(ended) == Timings(queue_ns=35, prefill_ns=6, decode_ns=7)


def test_timings_of_a_request_resubmitted_before_its_first_token_count_the_loss_as_queueing() -> None:
    clock = ManualClock(100)
    stream = OutputStream(Handle(1), make_job(received_ns=70), clock)
    clock.advance(1000)
    stream.resubmitted()
    stream.push(1)
    ended = Ended(Handle(1), FinishReason.LENGTH, queue_ns=5, prefill_ns=6, decode_ns=7)
    stream.end(ended)
    assert stream.timings(ended) == Timings(queue_ns=1035, prefill_ns=6, decode_ns=7)


def test_timings_of_a_request_resubmitted_in_its_output_are_the_gateways() -> None:
    clock = ManualClock(100)
    stream = OutputStream(Handle(1), make_job(received_ns=70), clock)
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
