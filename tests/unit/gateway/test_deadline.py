from __future__ import annotations

import pytest

from services.gateway.deadline import Deadline, first_deadline


def test_what_is_over_first_counts() -> None:
    assert first_deadline(100.0, None, None) is None
    assert first_deadline(100.0, 2.0, None) == Deadline(102.0, 2.0, is_calls=False)
    assert first_deadline(100.0, None, 3.0) == Deadline(103.0, 3.0, is_calls=True)
    assert first_deadline(100.0, 2.0, 3.0) == Deadline(102.0, 2.0, is_calls=False)
    assert first_deadline(100.0, 2.0, 1.5) == Deadline(101.5, 1.5, is_calls=True)


def test_the_error_says_whose_it_was() -> None:
    own, calls = Deadline(0, 0.25, is_calls=False), Deadline(0, 0.24987, is_calls=True)
    assert str(own.missed(" at all")) == "the request has not ended within its 0.25 s (timeout_s) at all"
    assert str(calls.missed("")) == "the request has not ended within its 0.25 s (the call's deadline)"


@pytest.mark.parametrize(
    ("is_calls", "now_s", "expected"),
    [(False, 199.99, False), (False, 200.0, True), (True, 200.0, True), (True, 199.0, True), (True, 198.9, False)],
)
def test_a_client_ends_its_call_a_little_early(is_calls: bool, now_s: float, expected: bool) -> None:
    assert Deadline(200.0, 100.0, is_calls=is_calls).has_ended_call(now_s) is expected
