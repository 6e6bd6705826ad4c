from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.mesh.log_lines import MAX_LINE_BYTES, LineSplitter, parse_line


def test_an_event_of_ours() -> None:
    line = parse_line("gateway", '{"event": "service_listening", "level": "info", "address": "127.0.0.1:5"}')
    assert (line.service, line.event, line.level, line.fields) == (
        "gateway",
        "service_listening",
        "info",
        {"address": "127.0.0.1:5"},
    )


@pytest.mark.parametrize(
    "text", ["", "hello", "{", "{}", "[1]", '{"event": 3}', '{"level": "info"}', '{"event": "x"', "{broken} json"]
)
def test_whatever_else_is_a_raw_line(text: str) -> None:
    line = parse_line("scheduler", text)
    assert line.event is None
    assert line.text == text


@given(st.lists(st.text(st.characters(blacklist_characters="\n\r", blacklist_categories=["Cs"]))), st.integers(1, 7))
def test_lines_come_out_whole_however_they_arrive(lines: list[str], size: int) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    splitter = LineSplitter()
    found = [line for at in range(0, len(data), size) for line in splitter.feed(data[at : at + size])]
    assert found == lines
    assert splitter.end() == []


def test_the_last_line_may_have_no_end() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\r\ntwo") == ["one"]
    assert splitter.end() == ["two"]
    assert splitter.end() == []


def test_a_line_without_end_is_cut() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"x" * (2 * MAX_LINE_BYTES + 1)) == ["x" * MAX_LINE_BYTES] * 2
    assert splitter.end() == ["x"]


def test_bytes_that_are_no_text_do_no_harm() -> None:
    assert LineSplitter().feed(b"\xff\xfe\n") == ["\ufffd\ufffd"]


@given(st.dictionaries(st.text(), st.integers() | st.text()), st.text())
def test_every_event_survives(fields: dict[str, object], event: str) -> None:
    fields = {key: value for key, value in fields.items() if key not in {"event", "level"}}
    line = parse_line("x", json.dumps({**fields, "event": event, "level": "error"}))
    assert (line.event, line.level, dict(line.fields)) == (event, "error", fields)
