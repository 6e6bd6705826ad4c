from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.tool_calls import HERMES, LLAMA3, MISTRAL, ToolCallFormat, ToolCallParser, detect_format

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shared.generation import ToolCallDelta

NAMES = {"f", "weather", "get.time-now_2"}
Calls = list[tuple[str, str, str]]


def _parse(form: ToolCallFormat, pieces: Iterable[str]) -> tuple[str, Calls]:
    """The text, and (id, name, arguments) of each call."""
    numbers = itertools.count()
    parser = ToolCallParser(form, NAMES, lambda: f"call_{next(numbers)}")
    results = [parser.push(piece) for piece in pieces]
    results.append(parser.finish())
    text = "".join(text for text, _ in results)
    return text, _joined([delta for _, deltas in results for delta in deltas])


def _joined(deltas: list[ToolCallDelta]) -> Calls:
    calls: Calls = []
    for delta in deltas:
        if delta.index == len(calls):
            assert delta.id
            assert delta.name
            calls.append((delta.id, delta.name, delta.arguments))
        else:
            assert (delta.index, delta.id, delta.name) == (len(calls) - 1, "", "")
            assert delta.arguments
            call_id, name, arguments = calls[-1]
            calls[-1] = (call_id, name, arguments + delta.arguments)
    return calls


CASES: list[tuple[ToolCallFormat, str, str, list[tuple[str, str]]]] = [
    (HERMES, "", "", []),
    (HERMES, "no call\n", "no call\n", []),
    (HERMES, " \n", " \n", []),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '\n\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n', "", [("f", "{}")]),
    (
        HERMES,
        'Wait <b>\n<tool_call>{"name": "f", "arguments": {"a": "</tool_call>\\"}"}}</tool_call> done',
        "Wait <b>\n done",
        [("f", '{"a": "</tool_call>\\"}"}')],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "weather", "arguments": {}}',
        "",
        [("f", "{}"), ("weather", "{}")],
    ),
    (HERMES, '<tool_call>{"arguments": {"a": [1, 2]}, "name": "f"}</tool_call>', "", [("f", '{"a": [1, 2]}')]),
    (HERMES, '<tool_call>{"id": 7, "name": "f", "parameters": {}, "x": [{}]}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call> \n {"name": "f"}\n \n</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"parameters": {"a": 1}, "name": "f", "arguments": {}}', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}, "name": "g", "arguments": {}}', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    # Broken off: what there is of a call is a call, and half a marker at the end is no marker.
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x', "", [("f", '{"a": "x')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
    (HERMES, "a < b <tool_c", "a < b <tool_c", []),
    # No calls.
    (HERMES, "<tool_call>so</tool_call>", "<tool_call>so</tool_call>", []),
    (HERMES, " \n<tool_call>so <tool_call>", " \n<tool_call>so <tool_call>", []),
    (MISTRAL, "\n [TOOL_CALLS] none", "\n [TOOL_CALLS] none", []),
    (HERMES, '<tool_call>{"name": "none"}</tool_call>', '<tool_call>{"name": "none"}</tool_call>', []),
    (HERMES, '<tool_call> {"name": 5}', '<tool_call> {"name": 5}', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": []}!', '<tool_call>{"name": "f", "arguments": []}!', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": "x"}!', '<tool_call>{"name": "f", "arguments": "x"}!', []),
    (
        HERMES,
        '<tool_call>oh <tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "<tool_call>oh ",
        [("f", "{}")],
    ),
    (HERMES, '<tool_call>{"a": "' + "x" * 5000 + '"}', '<tool_call>{"a": "' + "x" * 5000 + '"}', []),
    # Arguments that turn out to be no JSON cannot be taken back.
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": ?}}', "?}}", [("f", '{"a": ')]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
    (
        MISTRAL,
        'So:[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcdefghi"}, {"name": "weather", "arguments": {}}] ',
        "So:",
        [("f", "{}"), ("weather", "{}")],
    ),
    (MISTRAL, '[TOOL_CALLS] \n [ \n {"name": "f"} \n , \n {"name": "f"} \n ]', "", [("f", "{}")] * 2),
    (MISTRAL, "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    (MISTRAL, "[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    (MISTRAL, "[TOOL_CALLS] [", "[TOOL_CALLS] [", []),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f"}, {"name": "no"}]', ', {"name": "no"}]', [("f", "{}")]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f"}] and so on', " and so on", [("f", "{}")]),
    (LLAMA3, '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (LLAMA3, ' \n{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    (
        LLAMA3,
        '{"name": "f", "parameters": {}}; {"name": "weather", "parameters": {}}\n{"name": "f"}',
        "",
        [("f", "{}"), ("weather", "{}"), ("f", "{}")],
    ),
    (LLAMA3, ' {"city": "Paris"}', ' {"city": "Paris"}', []),
    (LLAMA3, '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    (LLAMA3, 'As JSON: {"name": "f", "parameters": {}}', 'As JSON: {"name": "f", "parameters": {}}', []),
    (LLAMA3, '<|python_tag|>print("f")', '<|python_tag|>print("f")', []),
    (LLAMA3, " <|python_tag|>", " <|python_tag|>", []),
]


@pytest.mark.parametrize(("form", "output", "text", "calls"), CASES)
def test_calls_are_found_however_the_output_is_cut(
    form: ToolCallFormat, output: str, text: str, calls: list[tuple[str, str]]
) -> None:
    expected = (text, [(f"call_{index}", *call) for index, call in enumerate(calls)])
    assert _parse(form, [output]) == expected
    assert _parse(form, output) == expected
    for size in (2, 3, 7):
        assert _parse(form, (output[at : at + size] for at in range(0, len(output), size))) == expected


FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "<tool_",
        "[",
        "]",
        "{",
        "}",
        ",",
        ";",
        " ",
        "\n",
    ),
    *('{"name": "f", "arguments": {"a": 1}}', '{"name": "f", ', '"arguments": {"b": "', '"', "text", "é🙂", "\\"),
]


@given(
    st.sampled_from([HERMES, LLAMA3, MISTRAL]),
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    st.lists(st.integers(1, 5), min_size=1),
)
def test_cuts_change_nothing_and_nothing_is_lost(form: ToolCallFormat, output: str, sizes: list[int]) -> None:
    whole = _parse(form, [output])
    pieces, at = [], 0
    for size in itertools.cycle(sizes):
        pieces.append(output[at : at + size])
        at += size
        if at >= len(output):
            break
    assert _parse(form, pieces) == whole
    text, calls = whole
    if not calls:
        assert text == output
    # What is text comes in the order in which it was written.
    letters = iter(output)
    assert all(letter in letters for letter in text)


@pytest.mark.parametrize(
    ("form", "output", "rest", "text", "arguments"),
    [
        (HERMES, 'So: <tool_call>{"name": "f"}', '</tool_call><tool_call>{"name": "f"}', "So: ", "{}"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}}', " and so on", "", '{"a": 1}'),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": ?', "}} and so on", "", '{"a": '),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f"}', ', {"name": "weather"}] ', "", "{}"),
        (LLAMA3, '{"name": "f", "parameters": {}}', '; {"name": "weather", "parameters": {}}', "", "{}"),
    ],
)
def test_where_there_may_be_one_call_all_ends_with_it(
    form: ToolCallFormat, output: str, rest: str, text: str, arguments: str
) -> None:
    for pieces in (output, [output], [output + rest], [*output, *rest]):
        parser = ToolCallParser(form, NAMES, lambda: "id", only_one=True)
        results, read = [], ""
        for piece in pieces:
            assert parser.is_over == read.startswith(output)
            results.append(parser.push(piece))
            read += piece
        assert parser.is_over
        results.append(parser.finish())
        assert "".join(text for text, _ in results) == text
        assert _joined([delta for _, deltas in results for delta in deltas]) == [("id", "f", arguments)]


def test_text_is_held_back_no_longer_than_a_marker_may_go_on() -> None:
    parser = ToolCallParser(HERMES, NAMES, lambda: "id")
    assert parser.push("a <")[0] == "a "
    assert parser.push("tool_")[0] == ""
    assert parser.push("b <tool_call")[0] == "<tool_b "
    assert parser.push("s>")[0] == "<tool_calls>"


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolCallParser(HERMES, NAMES, lambda: "id")
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == ("", ())
    for piece in ('{"a', '": "some', ' text"', "}"):
        (delta,) = parser.push(piece)[1]
        assert delta.arguments == piece
        assert (delta.id, delta.name) == (("id", "f") if piece == '{"a' else ("", ""))
    assert parser.push("}\n</tool_call>") == ("", ())


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.booleans()), max_size=4))
def test_all_arguments_survive(arguments: dict[str, object]) -> None:
    body = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False)
    text, ((_, _, read),) = _parse(HERMES, f"<tool_call>\n{body}\n</tool_call>")
    assert text == ""
    assert json.loads(read) == arguments


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ('... <tool_call>\\n{"name": ... </tool_call>', HERMES),
        ("{{ '[TOOL_CALLS] [' }}", MISTRAL),
        ('<|start_header_id|> ... \'{"name": "\' ... \'"parameters": \'', LLAMA3),
        ("<|python_tag|>", LLAMA3),
        ("[TOOL_CALLS]name[ARGS]{}", None),
        ("<tool_call>\n<function=name>", None),
        ("tools", None),
    ],
)
def test_the_notation_is_found_in_the_template(template: str, form: ToolCallFormat | None) -> None:
    assert detect_format(template) is form
