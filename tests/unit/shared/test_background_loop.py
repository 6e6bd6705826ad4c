from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from shared.background_loop import BackgroundLoop
from shared.errors import InvalidRequestError, OrcaError, UnavailableError
from shared.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop("test")
    yield loop
    loop.close()


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def nothing() -> None:
    pass


async def count(limit: int) -> AsyncGenerator[int, None]:
    for number in range(limit):
        yield number


def test_results_and_errors_come_back(loop: BackgroundLoop) -> None:
    async def name() -> str:
        return threading.current_thread().name

    async def failing() -> None:
        raise InvalidRequestError("so it is")

    assert loop.call(name) == "test"
    loop.call(nothing)
    with pytest.raises(InvalidRequestError, match="so it is"):
        loop.call(failing)


@pytest.mark.parametrize("length", [0, 1, 31, 32, 63, 64, 65, 500])
def test_a_stream_comes_whole(loop: BackgroundLoop, length: int) -> None:
    assert list(loop.stream(lambda: count(length))) == [*range(length)]


def test_a_stream_ends_with_its_error_once(loop: BackgroundLoop) -> None:
    async def failing() -> AsyncGenerator[int, None]:
        yield 1
        raise InvalidRequestError("so it is")

    stream = loop.stream(failing)
    assert next(stream) == 1
    with pytest.raises(InvalidRequestError, match="so it is"):
        next(stream)
    assert list(stream) == []


def test_a_stream_is_a_window_ahead_of_its_reader_at_most(loop: BackgroundLoop) -> None:
    made: list[int] = []
    is_far = threading.Event()

    async def watched() -> AsyncGenerator[int, None]:
        async for number in count(1000):
            made.append(number)
            if number == 64:
                is_far.set()
            yield number

    with loop.stream(watched) as stream:
        assert is_far.wait(10)
        loop.call(nothing)
        assert len(made) == 65, "64 have been carried, one waits"
        assert [next(stream) for _ in range(1000)] == [*range(1000)]


def test_closing_cancels_what_has_not_even_begun(loop: BackgroundLoop) -> None:
    ends = threading.Event()

    async def patient() -> AsyncGenerator[int, None]:
        try:
            await forever()
            yield 1
        finally:
            ends.set()

    for _ in range(50):
        loop.stream(patient).close()
    loop.call(nothing)
    with loop.stream(patient):
        loop.call(nothing)
    assert ends.wait(10)


def test_ending_the_loop_ends_all_who_wait() -> None:
    loop = BackgroundLoop("test")
    ended: list[str] = []

    async def at_end() -> None:
        ended.append("at end")

    def wait() -> StatusCode:
        with pytest.raises(OrcaError) as raised:
            loop.call(forever)
        return raised.value.code

    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(wait) for _ in range(4)]
        loop.call(nothing)
        loop.close(at_end)
        codes = {future.result(10) for future in waiting}
    # Those that came too late were told so at once.
    assert codes <= {StatusCode.CANCELLED, StatusCode.UNAVAILABLE}
    assert ended == ["at end"]
    loop.close(at_end)
    assert ended == ["at end"]
    with pytest.raises(UnavailableError, match="this client is closed"):
        loop.call(forever)
