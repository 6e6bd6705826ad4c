"""What begins with a slash in a conversation."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest

from services.cli.chat_commands import COMMANDS, complete
from shared.errors import UnavailableError
from shared.generation import ChatMessage, Delta, Finish, GenerateOptions, Guidance, GuidanceKind, ToolCall, Usage
from shared.messages import FinishReason

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.cli.conftest import Chat  # only for the type checker

SYSTEM = ChatMessage("system", "be brief")
ANSWERED = ChatMessage("assistant", "Once más")
LENGTH = Finish(FinishReason.LENGTH, 1, 0, 0, 0)


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def test_help_tells_of_every_command(chat: Chat) -> None:
    chat.run("/help")
    for command in COMMANDS:
        assert any(line.startswith(f"{command.name} {command.argument}") for line in chat.said)


def test_quit_leaves(chat: Chat) -> None:
    assert chat.run("/quit", "never read") == 0
    assert chat.asked == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/nonsense", "there is no /nonsense: /help lists what there is; // begins a message with a slash"),
        ("/reset now", "/reset takes nothing after it"),
        ("/set", "write /set NAME [VALUE]"),
        ("/save", "write /save FILE"),
        ("/undo", "there is nothing to take back"),
        ("/retry", "there is nothing to answer again"),
        ("/set warmth 3", "there is no option warmth; the options are temperature, top-k, "),
        ("/set temperature warm", "temperature: 'warm' is not a number from 0 to 100"),
        ("/set temperature 1 2", "temperature: '1 2' is not a number from 0 to 100"),
        ("/set ignore-eos yes", "ignore-eos: 'yes' is neither on nor off"),
        ("/set best-of 0", "best-of: '0' is not a whole number from 1 to 128"),
        ('/set stop "a', "stop: No closing quotation in"),
        ("/load /nowhere/at/all", "cannot read '/nowhere/at/all': No such file or directory"),
        ("/save /nowhere/at/all", "cannot write '/nowhere/at/all': No such file or directory"),
        ("/load ~nobody-of-that-name/x", "cannot read '~nobody-of-that-name/x': "),
    ],
)
def test_commands_that_cannot_be(chat: Chat, line: str, said: str) -> None:
    assert chat.run(line) == 0
    assert chat.said[0].startswith(f"error: {said}")
    assert chat.session.options == chat.session.base_options


def test_the_system_message_can_be_changed(chat: Chat) -> None:
    chat.run("/system be brief", "hello", "/system", "again")
    assert chat.asked == [[SYSTEM, user("hello")], [user("hello"), ANSWERED, user("again")]]


def test_reset_forgets_all_but_the_system_message(chat: Chat) -> None:
    chat.run("/system be brief", "hello", "/reset", "again")
    assert chat.asked[1] == [SYSTEM, user("again")]


def test_undo_takes_an_exchange_back(chat: Chat) -> None:
    chat.run("one", "two", "/undo", "three")
    assert chat.asked[2] == [user("one"), ANSWERED, user("three")]
    assert "(taken back; 2 messages are left)" in chat.said


def test_retry_answers_again(chat: Chat) -> None:
    chat.run("one", "/set seed 3", "/retry")
    assert chat.asked == [[user("one")], [user("one")]]
    assert len(chat.session.conversation.turns) == 2
    assert any("/set seed gives it up" in line for line in chat.said)


def test_retry_after_a_failure_asks_what_has_failed(chat: Chat) -> None:
    def failing() -> str:
        chat.gateway.failure = UnavailableError("not ready")
        return "two"

    def working() -> str:
        chat.gateway.failure = None
        return "/retry"

    chat.run("one", failing, working)
    assert chat.asked[2] == [user("one"), ANSWERED, user("two")]


def test_any_option_can_be_set(chat: Chat) -> None:
    lines = (
        "/set top-k 4",
        "/set --seed 3",
        '/set stop END "two words"',
        "/set logit_bias 7=-100 8=2",
        "/set ignore-eos on",
        r"/set regex \d+ [a-z]",
    )
    chat.run(*lines, "hello")
    expected = GenerateOptions(
        temperature=0.5,
        top_k=4,
        seed=3,
        stop=("END", "two words"),
        logit_bias={7: -100.0, 8: 2.0},
        ignore_eos=True,
        guidance=Guidance(GuidanceKind.REGEX, r"\d+ [a-z]"),
    )
    assert chat.gateway.asked[0][1] == expected
    chat.run("/set seed", "/set stop", "/set ignore-eos off", "/set json-object on", "/set temperature 0", "hello")
    assert chat.gateway.asked[1][1] == dataclasses.replace(
        expected,
        seed=None,
        stop=(),
        ignore_eos=False,
        guidance=Guidance(GuidanceKind.JSON_OBJECT),
        temperature=0.0,
    )
    chat.run("/set regex", "/set temperature", "hello")
    last = chat.gateway.asked[2][1]
    assert (last.guidance, last.temperature) == (None, 0.5)


def test_options_that_do_not_go_together_stay_as_they_were(chat: Chat) -> None:
    chat.run("/set n 4", "/set best-of 2")
    assert "error: --best-of 2 is below --n 4" in chat.said
    assert (chat.session.options.n, chat.session.options.best_of) == (4, None)


def test_show(chat: Chat) -> None:
    chat.run("/system be brief", "hello", "/set stop END", "/show")
    assert {
        "model: tiny, context 512 tokens",
        "system: be brief",
        "messages: 2",
        "temperature: 0.5",
        "seed: -",
        "logit-bias: -",
        "stop: ('END',)",
        "guidance: -",
    } <= set(chat.said)
    assert len([line for line in chat.said if ": " in line]) == 3 + len(dataclasses.fields(GenerateOptions))
    chat.run("/set regex [ab]+", "/show", "/set choice yes 'not now'", "/show", "/set json-object on", "/show")
    shown = [line for line in chat.said if line.startswith("guidance")]
    assert shown[1:] == ["guidance: regex [ab]+", "guidance: choices 'yes' 'not now'", "guidance: json_object"]


def test_tokens(chat: Chat) -> None:
    chat.gateway.deltas = (Delta("abc", (1,), LENGTH, usage=Usage(7, 3, 2)),)
    chat.run("/system be brief", "hello", "/tokens")
    at = chat.said.index("       8  system")
    assert chat.said[at + 1 : at + 5] == [
        "       5  user",
        "       3  assistant",
        "      16  in all, the template's own aside, of 512",
        "last answer: 3 tokens to 7 of prompt (2 found in the prefix cache)",
    ]


def test_a_conversation_is_saved_and_loaded(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "a conversation"
    chat.run("/system be brief", "hello ü", f"/save {path}", "/system", "/reset", f"/load {path}", "again")
    assert json.loads(path.read_text(encoding="utf-8")) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello ü"},
        {"role": "assistant", "content": "Once más"},
    ]
    assert chat.asked[1] == [SYSTEM, user("hello ü"), ANSWERED, user("again")]


def test_files_keep_all_that_a_message_has(chat: Chat, tmp_path: Path) -> None:
    turns = [
        ChatMessage("user", "time?", name="ann"),
        ChatMessage("assistant", "", (ToolCall("c1", "clock", "{}"),)),
        ChatMessage("tool", "noon", tool_call_id="c1"),
    ]
    chat.session.conversation.turns = [*turns]
    chat.run(f"/save {tmp_path}/x", "/reset", f"/load {tmp_path}/x")
    assert chat.session.conversation.messages == turns
    chat.run("/undo")
    assert chat.session.conversation.messages == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "is not a list of at most 10000 messages"),
        ("[" + "{}," * 10_000 + "{}]", "is not a list of at most 10000 messages"),
        ("[1]", "message 0 is not a JSON object"),
        ('[{"role": "user"}, {"content": "x"}]', "message 1 has no role"),
        ('[{"role": 1}]', "message 0: role is not a text"),
        ('[{"role": "user", "content": [{"type": "text"}]}]', "message 0: content is not a text"),
        ('[{"role": "assistant", "tool_calls": {}, "content": null}]', ""),
        ('[{"role": "assistant", "tool_calls": 1}]', "message 0: tool_calls is not a list"),
        ('[{"role": "assistant", "tool_calls": [1]}]', "message 0, tool call 0 is not a JSON object"),
        ('[{"role": "assistant", "tool_calls": [{}]}]', "message 0, tool call 0 is not a JSON object"),
        (" " * (4 * 2**20 + 1), "has more than 4194304 bytes"),
    ],
)
def test_files_that_are_no_conversations(chat: Chat, tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "x").write_text(content)
    chat.run("hello", f"/load {tmp_path}/x")
    assert said in chat.said[0]
    assert chat.said[0].startswith("error: " if said else "(1 messages read)")
    assert len(chat.session.conversation.messages) == (2 if said else 1)


def test_commands_and_options_are_completed() -> None:
    assert complete("", "/s") == ["/system", "/set", "/show", "/save"]
    assert complete("/set ", "top") == ["top-k", "top-p"]
    assert complete("hello ", "/s") == []
    assert complete("", "s") == []
