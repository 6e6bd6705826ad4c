from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from services.cli.line_input import MessageReader, history_path, line_editing

if TYPE_CHECKING:
    from collections.abc import Callable


def typing_in(*lines: str, prompts: list[str] | None = None) -> Callable[[str], str]:
    left = [*lines]

    def read_line(prompt: str) -> str:
        if prompts is not None:
            prompts.append(prompt)
        if not left:
            raise EOFError
        return left.pop(0)

    return read_line


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["hello"], "hello"),
        (["  hello  "], "hello"),
        ([""], ""),
        (["one\\", "two\\", "three"], "one\ntwo\nthree"),
        (["one\\"], "one"),
        (["/system one\\", "two"], "/system one\ntwo"),
        (['"""one', "", "  two", 'three"""'], "one\n\n  two\nthree"),
        (['"""', "one\\", '"""  '], "one\\"),
        (['"""one"""'], "one"),
        (['"""one', "two"], "one\ntwo"),
        (['"""', "/quit", '"""'], "//quit"),
        (['""""""'], ""),
    ],
)
def test_messages(lines: list[str], message: str) -> None:
    assert MessageReader(typing_in(*lines)).read() == message


def test_one_message_after_the_other() -> None:
    prompts: list[str] = []
    reader = MessageReader(typing_in("one\\", "two", "three", prompts=prompts), prompt="> ", more=". ")
    assert [reader.read(), reader.read()] == ["one\ntwo", "three"]
    with pytest.raises(EOFError):
        reader.read()
    assert prompts == ["> ", ". ", "> ", "> "]


def test_history_is_state_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    assert history_path({"XDG_STATE_HOME": "/state"}) == Path("/state/orca/chat_history")
    monkeypatch.setenv("HOME", "/home-of-somebody")
    assert history_path({"XDG_STATE_HOME": ""}) == Path("/home-of-somebody/.local/state/orca/chat_history")


def test_lines_are_remembered_by_later_conversations(tmp_path: Path) -> None:
    readline = pytest.importorskip("readline")
    history = tmp_path / "state" / "orca" / "chat_history"
    for lines, known in ((["one", "two"], []), ([], ["one", "two"]), (["three"], ["one", "two"])):
        with line_editing(history, lambda before, word: []):
            count = readline.get_current_history_length()
            assert [readline.get_history_item(index + 1) for index in range(count)] == known
            for line in lines:
                readline.add_history(line)
    assert history.read_text(encoding="utf-8").split() == ["one", "two", "three"]
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.parent.stat().st_mode & 0o777 == 0o700


def test_two_conversations_at_once_are_both_remembered(tmp_path: Path) -> None:
    readline = pytest.importorskip("readline")
    history = tmp_path / "chat_history"
    with line_editing(history, lambda before, word: []):
        readline.add_history("mine")
        history.write_text("theirs\n")
    assert history.read_text().split() == ["theirs", "mine"]


def test_nothing_is_remembered_where_that_is_not_wanted_or_not_possible(tmp_path: Path) -> None:
    readline = pytest.importorskip("readline")
    (tmp_path / "file").write_text("")
    for history in (None, tmp_path / "file" / "chat_history"):
        with line_editing(history, lambda before, word: []):
            readline.add_history("one")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
