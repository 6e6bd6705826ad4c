from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.stop_strings import StopMatch, StopStrings


def found(stops: list[str], text: str) -> str | None:
    """The text before the match."""
    data = text.encode()
    match = StopStrings(stops).matcher().read(data)
    return None if match is None else data[: match.end - match.num_bytes].decode()


def naive(stops: list[str], text: str) -> tuple[int, str] | None:
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            return end, max(here, key=len)
    return None


@pytest.mark.parametrize(
    ("stops", "text", "before"),
    [
        (["n bl"], "red green blue", "red gree"),
        (["n bl", "een b"], "red green blue", "red gr"),
        (["een b", "n bl"], "red green blue", "red gr"),
        (["ab", "abc"], "xabc", "x"),
        (["abc", "ab"], "xabc", "x"),
        (["abcd", "bc"], "abcd", "a"),
        (["bc", "abc"], "abc", ""),
        (["aab"], "aaab", "a"),
        (["👩‍🚀"], "a👩‍🚀é", "a"),
        (["é"], "e\u0301é", "e\u0301"),
        (["x"], "abc", None),
        (["!!!"], "hey!!", None),
    ],
)
def test_the_first_complete_match_wins(stops: list[str], text: str, before: str | None) -> None:
    assert found(stops, text) == before


@given(
    stops=st.lists(st.text("ab é", min_size=1, max_size=5), min_size=1, max_size=4),
    text=st.text("ab é", max_size=30),
    cuts=st.lists(st.integers(0, 60)),
)
def test_it_finds_what_a_naive_search_finds_however_the_text_comes(
    stops: list[str], text: str, cuts: list[int]
) -> None:
    data = text.encode()
    matcher = StopStrings(stops).matcher()
    expected = naive(stops, text)
    begin = 0
    for place in sorted({*(cut for cut in cuts if cut < len(data)), len(data)}):
        match = matcher.read(data[begin:place])
        if match is not None:
            assert expected is not None
            end, stop = expected
            assert (begin + match.end, match.text) == (len(text[:end].encode()), stop)
            return
        targets = [stop.encode() for stop in stops]
        prefixes = [target[:size] for target in targets for size in range(len(target))]
        assert matcher.num_held_bytes == max(len(prefix) for prefix in prefixes if data[:place].endswith(prefix))
        begin = place
    assert expected is None


def test_matches_that_do_not_count_are_text() -> None:
    matcher = StopStrings(["aa"]).matcher()
    assert matcher.read(b"aa", accept=False) is None
    assert matcher.read(b"a") == StopMatch("aa", 2, 1), "one that began before and ends now counts"


def test_time_does_not_grow_with_how_often_a_match_begins() -> None:
    stops = StopStrings(["a" * 1023 + chr(ord("b") + index) for index in range(16)])
    matcher = stops.matcher()
    begin = time.process_time()
    for _ in range(2000):
        assert matcher.read(b"aaaa") is None
    assert time.process_time() - begin < 2
    assert matcher.num_held_bytes == 1023
