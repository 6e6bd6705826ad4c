"""What a body holds is counted without building it."""

from __future__ import annotations

import json
import re
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.http import body_size
from services.gateway.http.body_size import MAX_CONTAINERS, MAX_ITEMS, MAX_KEYS, overload


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b'{"prompt":[' + b"[]," * MAX_CONTAINERS + b"[]]}", "lists and objects"),
        (b"{" + b",".join(b'"%d":1' % index for index in range(MAX_KEYS + 1)) + b"}", "keys"),
        (b'{"prompt":[' + b"1," * (MAX_ITEMS + 1) + b"1]}", "items"),
        (b'{"stop":[' + b'"a",' * (MAX_ITEMS + 1) + b'"a"]}', "items"),
    ],
)
def test_that_too_much_is_named(data: bytes, name: str) -> None:
    found = overload(data)

    assert found is not None
    assert re.fullmatch(rf"more than \d+ {name}", found)


@pytest.mark.parametrize("text", ["a,b:c[{" * 200_000, '"' * 1_500_000, "\\," * 1_200_000, "é:\n" * 500_000])
def test_that_marks_in_texts_are_not_counted(text: str) -> None:
    assert overload(json.dumps({"prompt": text}).encode()) is None


def test_that_as_many_ids_as_there_may_be_pass() -> None:
    assert overload(b'{"prompt":[' + b"1," * (MAX_ITEMS - 1) + b"1]}") is None


@pytest.mark.parametrize("data", [b'"' + b'\\"' * 4_000_000, b'\\"' * 4_000_000, b'"' * 8_000_000, b'",' * 2_000_000])
def test_that_strings_without_an_end_take_no_longer(data: bytes) -> None:
    started = process_time()
    overload(data + b":" * (MAX_KEYS + 1))

    assert process_time() - started < 10


_VALUES = st.recursive(
    st.none() | st.text(alphabet='a"\\,:[]{}é') | st.integers(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='a",:[{\\'), inner, max_size=4),
    max_leaves=12,
)


@given(_VALUES)
def test_that_counts_are_those_of_the_parsed_value(value: object) -> None:
    data = json.dumps(value).encode()
    outside = b"".join(body_size._outside_strings(data))
    keys, containers = _counts(value)

    assert outside.count(b":") == keys
    assert outside.count(b"[") + outside.count(b"{") == containers


def _counts(value: object) -> tuple[int, int]:
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [_counts(item) for item in (value.values() if isinstance(value, dict) else value)]
    own_keys = len(value) if isinstance(value, dict) else 0
    return own_keys + sum(keys for keys, _ in inner), 1 + sum(containers for _, containers in inner)
