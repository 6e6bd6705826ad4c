from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shared.client import ChatMessage
from shared.errors import InvalidRequestError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.cli.conftest import FakeGateway, Outcome  # only for the type checker

SYSTEM = ChatMessage("system", "be brief")


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


ANSWERED = ChatMessage("assistant", "Once más")


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Type lines (or raise what the terminal would raise), then Ctrl-D."""

    def type_in(*lines: str | type[BaseException] | Callable[[], str]) -> None:
        left = [*lines]

        def read(prompt: str) -> str:
            assert prompt == "", "there is no terminal here"
            line = left.pop(0) if left else EOFError
            if isinstance(line, str):
                return line
            if isinstance(line, type):
                raise line
            return line()

        monkeypatch.setattr("builtins.input", read)

    return type_in


def test_a_conversation_has_a_memory(
    orca: Callable[..., Outcome], gateway: FakeGateway, typed: Callable[..., None]
) -> None:
    typed("hello", "  ", "and then?")
    outcome = orca("chat", "--system", "be brief", "--seed", "7")
    assert outcome.exit_code == 0
    assert outcome.out == "Once más\nOnce más\n"
    assert [messages for messages, _ in gateway.asked] == [
        [SYSTEM, user("hello")],
        [SYSTEM, user("hello"), ANSWERED, user("and then?")],
    ]
    assert all(options.seed == 7 and options.max_tokens is None for _, options in gateway.asked)


def test_reset_forgets_all_but_the_system_message(
    orca: Callable[..., Outcome], gateway: FakeGateway, typed: Callable[..., None]
) -> None:
    typed("hello", "/reset", "again")
    orca("chat", "-s", "be brief")
    assert gateway.asked[1][0] == [SYSTEM, user("again")]


def test_commands(orca: Callable[..., Outcome], gateway: FakeGateway, typed: Callable[..., None]) -> None:
    typed("/help", KeyboardInterrupt, "/quit", "never read")
    outcome = orca("chat")
    assert outcome.exit_code == 0
    assert "/reset  forget the conversation" in outcome.err
    assert "(Ctrl-D or /quit leaves)" in outcome.err
    assert gateway.asked == []


def test_ctrl_c_stops_the_answer_only(
    orca: Callable[..., Outcome], gateway: FakeGateway, typed: Callable[..., None]
) -> None:
    def interrupted() -> str:
        gateway.deltas = gateway.deltas[:1]
        gateway.failure = KeyboardInterrupt()
        return "hello"

    def undisturbed() -> str:
        gateway.failure = None
        return "go on"

    typed(interrupted, undisturbed)
    outcome = orca("chat")
    assert outcome.exit_code == 0
    assert "(stopped)" in outcome.err
    assert gateway.asked[1][0] == [user("hello"), ChatMessage("assistant", "Once "), user("go on")]


@pytest.mark.parametrize(
    ("failure", "hint"),
    [(InvalidRequestError("the prompt is too long"), "; /reset makes room"), (UnavailableError("not ready"), "")],
)
def test_a_turn_that_fails_is_not_remembered(
    orca: Callable[..., Outcome], gateway: FakeGateway, typed: Callable[..., None], failure: Exception, hint: str
) -> None:
    def failing() -> str:
        gateway.failure = failure
        return "too long"

    def working() -> str:
        gateway.failure = None
        return "short"

    typed("hello", failing, working)
    outcome = orca("chat")
    assert outcome.exit_code == 0
    assert f"error: {failure}{hint}\n" in outcome.err
    assert gateway.asked[2][0] == [user("hello"), ANSWERED, user("short")]


def test_models_without_a_template_are_refused(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    gateway.has_chat_template = False
    assert orca("chat") == (1, "", "error: tiny has no chat template: use `orca generate` instead\n")


def test_nobody_there(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    gateway.failure = UnavailableError("gateway at h:1: DNS resolution failed for h:1")
    outcome = orca("chat", "-a", "h:1")
    assert outcome.exit_code == 1
    assert "start a mesh with `orca up`" in outcome.err
