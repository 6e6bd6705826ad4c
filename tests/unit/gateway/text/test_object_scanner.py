from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.object_scanner import ObjectScanner

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=4)


def _feed(scanner: ObjectScanner, text: str, size: int) -> str:
    for at in range(0, len(text), size):
        rest = scanner.feed(text[at : at + size])
        if rest or scanner.is_complete:
            return rest + text[at + size :]
    return ""


@given(OBJECTS, st.integers(1, 9), st.booleans(), st.sampled_from([None, 2]))
def test_every_object_is_read_to_its_end(content: dict[str, object], size: int, ascii_only: bool, indent: int) -> None:
    text = json.dumps(content, ensure_ascii=ascii_only, indent=indent)
    scanner = ObjectScanner()
    assert _feed(scanner, text + ' }{"', size) == ' }{"'
    assert scanner.is_complete
    assert not scanner.is_broken
    assert {key: json.loads(member.text) for key, member in scanner.members.items()} == content
    assert all(member.is_complete for member in scanner.members.values())


@given(OBJECTS, st.data())
def test_the_first_character_that_does_not_fit_is_found(content: dict[str, object], data: st.DataObject) -> None:
    """What the scanner has taken can always go on to be an object, as Python's own reader confirms."""
    text = json.dumps(content)
    at = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:at] + data.draw(st.sampled_from(list('{}[]",:x0-\n\\'))) + text[at + 1 :]
    scanner = ObjectScanner()
    rest = _feed(scanner, damaged, 1)
    try:
        value, end = json.JSONDecoder().raw_decode(damaged)
        is_object = isinstance(value, dict)
    except ValueError:
        is_object = False
    assert scanner.is_complete == is_object
    if is_object:
        assert rest == damaged[end:]


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("[1]", ""),
        ("1", ""),
        (" {}", ""),
        ("{a: 1}", "{"),
        ('{"a" 1}', '{"a" '),
        ('{"a": 1,}', '{"a": 1,'),
        ('{"a": [1,]}', '{"a": [1,'),
        ('{"a": 01}', '{"a": 01'),
        ('{"a": nul}', '{"a": nul'),
        ('{"a": 1.}', '{"a": 1.'),
        ('{"a": NaN}', '{"a": '),
        ('{"a": "\n"}', '{"a": "'),
        ('{"a": "\\x"}', '{"a": "\\'),
        ('{"a": "\\u12g4"}', '{"a": "\\u12'),
        ('{"a": [}', '{"a": ['),
        ('{"a": {]', '{"a": {'),
        ('{"a": ' + "[" * 200, '{"a": ' + "[" * 99),
        ('{"a": ' + "1" * 2000, '{"a": ' + "1" * 1000),
    ],
)
def test_what_is_no_object_is_broken_at_once(text: str, taken: str) -> None:
    scanner = ObjectScanner()
    assert scanner.feed(text) == text[len(taken) :]
    assert scanner.is_broken
    assert not scanner.is_complete


def test_members_are_known_before_they_end() -> None:
    scanner = ObjectScanner()
    assert scanner.feed('{"name": "f", "arguments": {"a": {"name": 5}, ') == ""
    name, arguments = scanner.members["name"], scanner.members["arguments"]
    assert (name.text, name.is_complete) == ('"f"', True)
    assert arguments.take() == '{"a": {"name": 5}, '
    assert scanner.feed('"b": [1]} , ') == ""
    assert (arguments.take(), arguments.is_complete) == ('"b": [1]}', True)
    assert list(scanner.members) == ["name", "arguments"]
