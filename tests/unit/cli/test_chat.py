"""Conversations: what is asked, remembered and shown, and how they end."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest

from shared.errors import InvalidRequestError, UnavailableError
from shared.generation import ChatMessage, Delta, Finish, GenerateOptions, Usage
from shared.messages import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.cli.conftest import Chat, FakeGateway, Outcome  # only for the type checker

SYSTEM = ChatMessage("system", "be brief")
ANSWERED = ChatMessage("assistant", "Once más")
LENGTH = Finish(FinishReason.LENGTH, 1, 0, 0, 0)


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def test_a_conversation_has_a_memory(chat: Chat) -> None:
    assert chat.run("hello", "", "and then?") == 0
    assert chat.out.getvalue() == "Once más\nOnce más\n"
    assert chat.asked == [[user("hello")], [user("hello"), ANSWERED, user("and then?")]]
    assert chat.said == [""]


def test_a_message_may_begin_with_a_slash(chat: Chat) -> None:
    chat.run("//etc is a folder")
    assert chat.asked == [[user("/etc is a folder")]]


def test_ctrl_c_stops_the_answer_only(chat: Chat) -> None:
    def interrupted() -> str:
        chat.gateway.deltas = chat.gateway.deltas[:1]
        chat.gateway.failure = KeyboardInterrupt()
        return "hello"

    def undisturbed() -> str:
        chat.gateway.failure = None
        return "go on"

    assert chat.run(interrupted, undisturbed) == 0
    assert "(stopped)" in chat.said
    assert chat.asked[1] == [user("hello"), ChatMessage("assistant", "Once "), user("go on")]
    assert chat.gateway.num_cancelled == 1


def test_ctrl_c_before_the_first_text_leaves_the_question_open(chat: Chat) -> None:
    def interrupted() -> str:
        chat.gateway.deltas, chat.gateway.failure = (), KeyboardInterrupt()
        return "hello"

    def undisturbed() -> str:
        chat.gateway.failure = None
        return "/retry"

    chat.run(interrupted, undisturbed)
    assert chat.asked == [[user("hello")], [user("hello")]]


def test_ctrl_c_twice_leaves(chat: Chat) -> None:
    assert chat.run(KeyboardInterrupt, "/undo", KeyboardInterrupt, KeyboardInterrupt, "never read") == 130
    assert chat.asked == []
    assert chat.said.count("(Ctrl-C again, Ctrl-D or /quit leaves)") == 2


def test_ctrl_c_in_an_answer_and_again_leaves(chat: Chat) -> None:
    chat.gateway.failure = KeyboardInterrupt()
    assert chat.run("hello", KeyboardInterrupt, "never read") == 130


@pytest.mark.parametrize("in_answer", [False, True])
def test_ctrl_c_ends_a_script(chat: Chat, in_answer: bool) -> None:
    chat.gateway.failure = KeyboardInterrupt() if in_answer else None
    assert chat.run("hello" if in_answer else KeyboardInterrupt, "never read", is_script=True) == 130
    assert len(chat.asked) == in_answer


@pytest.mark.parametrize(
    ("failure", "hint"),
    [
        (InvalidRequestError("that is over the context of 8 tokens"), ". /undo or /reset makes room"),
        (InvalidRequestError("that is over 8 K/V slots"), ". /undo or /reset makes room"),
        (InvalidRequestError("top_p is 3"), ""),
        (UnavailableError("not ready"), ""),
    ],
)
def test_a_turn_that_fails_is_not_remembered(chat: Chat, failure: Exception, hint: str) -> None:
    def failing() -> str:
        chat.gateway.failure = failure
        return "too long"

    def working() -> str:
        chat.gateway.failure = None
        return "short"

    assert chat.run("hello", failing, working) == 0
    assert f"error: {failure}{hint}" in chat.said
    assert chat.asked[2] == [user("hello"), ANSWERED, user("short")]


def test_a_first_message_that_is_too_long_can_only_be_shortened(chat: Chat) -> None:
    chat.gateway.failure = InvalidRequestError("over the context; shorten it")
    chat.run("hello")
    assert "error: over the context; shorten it" in chat.said


def test_a_script_ends_with_its_first_error(chat: Chat) -> None:
    chat.gateway.failure = UnavailableError("not ready")
    assert chat.run("hello", "never read", is_script=True) == 1
    assert len(chat.asked) == 1
    assert chat.run("/nonsense", "never read", is_script=True) == 1
    bad = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    assert chat.run(bad, "never read", is_script=True) == 1
    assert chat.said[-1] == "error: the line is not UTF-8 text (byte 0)"


def test_a_gateway_that_has_gone_is_told_plainly(chat: Chat) -> None:
    chat.gateway.failure = UnavailableError("gateway at h:1: failed to connect to all addresses")
    chat.run("hello")
    assert chat.said[0].startswith("error: no gateway answers at h:1: start a mesh with `orca up`")


def test_an_answer_that_was_cut_says_so(chat: Chat) -> None:
    chat.gateway.deltas = (Delta("Once", (1,), LENGTH, usage=Usage(1, 1)),)
    chat.run("hello", "/set max-tokens 1", "hello")
    assert chat.said[0] == "(the context is full: /undo or /reset makes room)"
    assert chat.said[1] == "(cut: /set max-tokens COUNT allows more)"


def test_with_several_choices_the_first_one_goes_on(chat: Chat) -> None:
    chat.gateway.deltas = (
        Delta("b", (1,), LENGTH, choice=1),
        Delta("a", (1,), LENGTH, usage=Usage(1, 2)),
    )
    chat.run("/set n 2", "/set max-tokens 1", "hello", "again")
    assert chat.asked[1] == [user("hello"), ChatMessage("assistant", "a"), user("again")]
    assert [line for line in chat.out.getvalue().splitlines() if "─" not in line] == ["a", "b"] * 2
    assert "(the conversation goes on with choice 1)" in chat.said


def script(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_standard_input_is_a_script(
    orca: Callable[..., Outcome], gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, 'hello\\\nworld\n\n"""\n/etc is\n\n  a folder\n"""\n/undo\n/retry\n')
    outcome = orca("chat", "--system", "be brief", "--seed", "7")
    assert outcome.exit_code == 0
    assert outcome.out == "Once más\nOnce más\nOnce más\n"
    hello = user("hello\nworld")
    assert [messages for messages, _ in gateway.asked] == [
        [SYSTEM, hello],
        [SYSTEM, hello, ANSWERED, user("/etc is\n\n  a folder")],
        [SYSTEM, hello],
    ]
    assert all(options == GenerateOptions(temperature=0.7, top_p=0.95, seed=7) for _, options in gateway.asked)


def test_a_script_that_fails_fails(
    orca: Callable[..., Outcome], gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, "/nonsense\nhello\n")
    outcome = orca("chat")
    assert (outcome.exit_code, outcome.out) == (1, "")
    assert outcome.err.startswith("error: there is no /nonsense")
    assert gateway.asked == []


def test_models_without_a_template_are_refused(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    gateway.has_chat_template = False
    assert orca("chat") == (1, "", "error: tiny has no chat template: use `orca generate` instead\n")


def test_nobody_there(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    gateway.failure = UnavailableError("gateway at h:1: DNS resolution failed for h:1")
    outcome = orca("chat", "-a", "h:1")
    assert outcome.exit_code == 1
    assert "start a mesh with `orca up`" in outcome.err


def test_chat_takes_the_options_of_generate(orca: Callable[..., Outcome], gateway: FakeGateway) -> None:
    assert orca("chat", "--best-of", "1", "--n", "2").exit_code == 2
