from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from services.cli.answers import AnswerPrinter
from shared.generation import Delta, Finish, GenerateOptions, Usage
from shared.messages import FinishReason

END = Finish(FinishReason.LENGTH, 1, 0, 0, 0)


def printed(*deltas: Delta, n: int = 1, is_terminal: bool = False, ends_line: bool = False) -> str:
    console = Console(file=io.StringIO(), width=40, force_terminal=is_terminal, no_color=True)
    printer = AnswerPrinter(console, GenerateOptions(n=n), ends_line=ends_line)
    for delta in deltas:
        printer.add(delta)
    printer.close()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_text_is_printed_as_it_comes() -> None:
    console = Console(file=io.StringIO())
    printer = AnswerPrinter(console, GenerateOptions(), ends_line=True)
    shown = []
    for delta in (Delta(request_id="r"), Delta("a", (1,)), Delta("b", (2,), END, usage=Usage(1, 2))):
        printer.add(delta)
        assert isinstance(console.file, io.StringIO)
        shown.append(console.file.getvalue())
    assert shown == ["", "a", "ab\n"]
    assert (printer.text, printer.finish, printer.usage) == ("ab", END, Usage(1, 2))


@pytest.mark.parametrize(
    ("text", "ends_line", "out"),
    [("a", False, "a"), ("a", True, "a\n"), ("a\n", True, "a\n"), ("", True, ""), ("\n", True, "\n")],
)
def test_the_last_line_ends_where_that_is_wanted(text: str, ends_line: bool, out: str) -> None:
    assert printed(Delta(text, (1,), END), ends_line=ends_line) == out
    assert printed(Delta(text, (1,)), ends_line=ends_line) == out, "an output that did not end"


def test_a_terminal_is_not_steered_by_an_output() -> None:
    text = "a\x1b[2Jb\x07\r\n\tc\x7f\x9b1mé"
    assert printed(Delta(text, (1,), END)) == text
    assert printed(Delta(text, (1,), END), is_terminal=True) == "a␛[2Jb␇␍\n\tc␡\ufffd1mé"


@given(st.permutations([(choice, step) for choice in range(3) for step in range(3)]))
def test_choices_come_in_order_however_they_are_mixed(order: list[tuple[int, int]]) -> None:
    num_seen = [0, 0, 0]
    deltas = []
    for choice, _ in order:
        step = num_seen[choice]
        num_seen[choice] += 1
        deltas.append(Delta(f"{'abc'[choice]}{step} ", (1,), END if step == 2 else None, choice=choice))
    lines = printed(*deltas, n=3).splitlines()
    assert [line.strip("─ ") for line in lines] == [
        "choice 1 of 3",
        "a0 a1 a2",
        "choice 2 of 3",
        "b0 b1 b2",
        "choice 3 of 3",
        "c0 c1 c2",
    ]
