from __future__ import annotations

import asyncio
import random

import pytest

from services.gateway.clients import ANONYMOUS, Client
from services.gateway.request_limit import RequestLimit
from shared.clock import ManualClock
from shared.errors import InvalidRequestError, OverloadedError


class Request:
    """A request that holds its places until it is told to end."""

    def __init__(
        self, limit: RequestLimit, client: Client = ANONYMOUS, num_places: int = 1, num_bytes: int = 0
    ) -> None:
        self.began = asyncio.Event()
        self.end = asyncio.Event()
        self.task = asyncio.create_task(self._run(limit, client, num_places, num_bytes))

    async def _run(self, limit: RequestLimit, client: Client, num_places: int, num_bytes: int) -> None:
        async with limit.slots(client, num_places, num_bytes=num_bytes):
            self.began.set()
            await self.end.wait()

    async def finish(self) -> None:
        self.end.set()
        await asyncio.wait_for(self.task, 10)

    async def cancel(self) -> None:
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task


async def settled() -> None:
    """Let everything run that can."""
    loop = asyncio.get_running_loop()
    for _ in range(10):
        turn: asyncio.Future[None] = loop.create_future()
        loop.call_soon(turn.set_result, None)
        await turn


async def test_places_are_given_back() -> None:
    limit = RequestLimit(2)
    await limit.wait_idle()
    async with limit.slots(ANONYMOUS):
        async with limit.slots(ANONYMOUS):
            with pytest.raises(OverloadedError, match=r"serves 2 requests \(--max-requests 2\) and 0 wait"):
                async with limit.slots(ANONYMOUS):
                    raise AssertionError("a place too many")
            assert limit.num_requests == limit.num_in_service == 2
        with pytest.raises(ZeroDivisionError):
            async with limit.slots(ANONYMOUS):
                raise ZeroDivisionError
        assert limit.num_requests == 1
    assert limit.num_requests == 0
    await limit.wait_idle()


async def test_who_waits_is_served_in_order() -> None:
    limit = RequestLimit(1, max_queued=2)
    one, two, three = (Request(limit) for _ in range(3))
    await settled()
    assert (limit.num_in_service, limit.num_queued, limit.num_requests) == (1, 2, 3)
    for request, follower in ((one, two), (two, three)):
        assert request.began.is_set()
        assert not follower.began.is_set()
        await request.finish()
        await settled()
    await three.finish()
    await limit.wait_idle()


async def test_the_surplus_is_refused_at_once_and_the_rest_finishes() -> None:
    limit = RequestLimit(8, max_queued=16)
    requests = [Request(limit, num_places=4 if at % 10 == 0 else 1) for at in range(200)]
    await settled()
    refused = [request for request in requests if request.task.done()]
    assert all(isinstance(request.task.exception(), OverloadedError) for request in refused)
    assert limit.num_in_service == 8
    assert limit.num_queued == 16
    for request in requests:
        if request not in refused:
            await request.finish()
    assert limit.num_requests == 0


async def test_a_cancelled_request_leaves_the_queue_at_once() -> None:
    limit = RequestLimit(1, max_queued=1)
    one, two = Request(limit), Request(limit)
    await settled()
    await two.cancel()
    assert limit.num_queued == 0
    three = Request(limit)
    await settled()
    assert not three.task.done()
    await one.finish()
    await three.finish()


async def test_a_deadline_holds_in_the_queue() -> None:
    limit = RequestLimit(1, max_queued=1)
    async with limit.slots(ANONYMOUS):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0), limit.slots(ANONYMOUS):
                raise AssertionError("there was no place")
        assert limit.num_queued == 0


async def test_a_place_that_comes_with_a_cancellation_is_not_lost() -> None:
    limit = RequestLimit(1, max_queued=2)
    one, two, three = (Request(limit) for _ in range(3))
    await settled()
    one.end.set()
    await one.task  # the place is the second one's now, which does not know yet
    two.task.cancel()
    await settled()
    assert two.task.cancelled()
    assert three.began.is_set()
    await three.finish()
    assert limit.num_requests == 0


async def test_a_place_for_one_who_is_just_leaving_goes_to_the_next() -> None:
    limit = RequestLimit(1, max_queued=2)
    one, two, three = (Request(limit) for _ in range(3))
    await settled()
    one.end.set()
    two.task.cancel()  # before the first one gives its place back, and before the second one knows
    await settled()
    assert one.task.done()
    assert one.task.exception() is None
    assert two.task.cancelled()
    assert three.began.is_set()
    await three.finish()
    assert limit.num_requests == 0


async def test_a_refusal_for_one_who_is_just_leaving_leaves_no_trace() -> None:
    limit = RequestLimit(1, max_queued=1)
    one, two = Request(limit), Request(limit)
    await settled()
    three = Request(limit, Client("b", weight=2))
    two.task.cancel()  # before the third one takes its place in the queue
    await settled()
    assert two.task.cancelled()
    assert not three.task.done()
    await one.finish()
    await three.finish()


async def test_a_wide_request_leaves_room_when_it_gives_up() -> None:
    limit = RequestLimit(2, max_queued=3)
    one, wide, narrow = Request(limit), Request(limit, num_places=2), Request(limit)
    await settled()
    assert not narrow.began.is_set()
    await wide.cancel()
    await settled()
    assert narrow.began.is_set()
    await one.finish()
    await narrow.finish()


async def test_a_flood_makes_room_for_others() -> None:
    limit = RequestLimit(1, max_queued=2)
    flood = [Request(limit, Client("a")) for _ in range(3)]
    await settled()
    late = Request(limit, Client("b"))
    await settled()
    assert isinstance(flood[2].task.exception(), OverloadedError)
    await flood[0].finish()
    await settled()
    assert late.began.is_set(), "before the flood's next"
    await late.finish()
    await flood[1].finish()


async def test_what_can_never_have_places_is_told_so() -> None:
    limit = RequestLimit(4, max_queued=100)
    with pytest.raises(InvalidRequestError, match=r"asks for 5 choices; the gateway serves 4 at once"):
        async with limit.slots(ANONYMOUS, 5):
            pass
    with pytest.raises(InvalidRequestError, match=r"asks for 3 choices; this API key may have 2 at once"):
        async with limit.slots(Client("a", max_requests=2), 3):
            pass
    await limit.wait_idle()


async def test_bytes_in_the_queue_are_bounded() -> None:
    limit = RequestLimit(1, max_queued=100, max_queued_bytes=1000)
    one = Request(limit, num_bytes=10**9)
    two, three = Request(limit, num_bytes=600), Request(limit, num_bytes=600)
    await settled()
    assert one.began.is_set(), "what is served at once waits nowhere"
    assert isinstance(three.task.exception(), OverloadedError)
    await one.finish()
    await two.finish()


async def test_the_hint_grows_with_the_queue_and_the_length_of_requests() -> None:
    clock = ManualClock()
    limit = RequestLimit(2, max_queued=4, clock=clock)

    async def hint() -> float:
        requests = [Request(limit) for _ in range(6)]
        await settled()
        with pytest.raises(OverloadedError) as refused:
            async with limit.slots(ANONYMOUS):
                pass
        clock.advance(40 * 10**9)
        for request in requests:
            await request.finish()
        assert refused.value.retry_after_s is not None
        return refused.value.retry_after_s

    first, second = await hint(), await hint()
    assert first == 3
    assert first < second <= 60


async def test_any_course_of_arrivals_and_cancellations_leaks_nothing() -> None:
    chance = random.Random(7)
    limit = RequestLimit(5, max_queued=10)
    clients = [Client("a"), Client("b", 3.0, 3), Client("c", 0.5)]
    live: list[Request] = []
    for _ in range(2000):
        match chance.randrange(4):
            case 0 | 1:
                live.append(Request(limit, chance.choice(clients), chance.randint(1, 3), chance.randint(0, 100)))
            case 2 if live:
                chance.choice(live).end.set()
            case 3 if live:
                chance.choice(live).task.cancel()
        if chance.random() < 0.3:
            await settled()
        assert limit.num_in_service <= 5
    for request in live:
        request.end.set()
    await asyncio.wait_for(asyncio.gather(*(request.task for request in live), return_exceptions=True), 10)
    assert (limit.num_requests, limit.num_in_service, limit.num_queued) == (0, 0, 0)
    assert not limit._turns
    assert not limit._queue._flows
    await limit.wait_idle()
