"""What can be typed in a conversation besides messages: a function for each ``/command``, and the table of all."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from services.cli.conversation import load_messages, save_messages
from services.cli.generation_options import OPTIONS, checked, option_named

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.cli.chat_session import ChatSession
    from shared.generation import Guidance

__all__ = ["COMMANDS", "ChatCommand", "command_named", "complete"]


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """A command of a conversation."""

    name: str
    argument: str
    """What follows the name, for people; empty: nothing may."""
    help: str
    run: "Callable[[ChatSession, str], None]"
    """Gets the session and the rest of the line. Raises ``typer.BadParameter`` or an ``OrcaError``."""


def command_named(name: str) -> ChatCommand:
    """The command of that name, which begins with a slash. Raises ``typer.BadParameter`` where there is none."""
    for command in COMMANDS:
        if command.name == name:
            return command
    raise typer.BadParameter(f"there is no {name}: /help lists what there is; // begins a message with a slash")


def complete(before: str, word: str) -> list[str]:
    """What ``word`` may become, after ``before``."""
    if before.strip() == "/set":
        return [option.name for option in OPTIONS if option.name.startswith(word)]
    if not before.strip() and word.startswith("/"):
        return [command.name for command in COMMANDS if command.name.startswith(word)]
    return []


def _help(session: "ChatSession", _: str) -> None:
    for command in COMMANDS:
        session.note(f"{command.name + ' ' + command.argument:18}  {command.help}")
    session.note('A line that ends with \\ goes on with the next one, and so does all between two lines of """.')
    session.note("Ctrl-C stops an answer, twice it leaves, as Ctrl-D does.")


def _system(session: "ChatSession", text: str) -> None:
    session.conversation.system = text or None
    session.note("(set)" if text else "(no system message)")


def _reset(session: "ChatSession", _: str) -> None:
    session.conversation.turns.clear()
    session.unanswered = None
    session.note("(forgotten)")


def _undo(session: "ChatSession", _: str) -> None:
    if session.conversation.take_back() is None:
        raise typer.BadParameter("there is nothing to take back")
    session.unanswered = None
    session.note(f"(taken back; {len(session.conversation.turns)} messages are left)")


def _retry(session: "ChatSession", _: str) -> None:
    question = session.unanswered or session.conversation.take_back()
    if question is None:
        raise typer.BadParameter("there is nothing to answer again")
    if session.options.seed is not None:
        session.note("(with a seed the same question has the same answer: /set seed gives it up)")
    session.ask(question)


def _set(session: "ChatSession", argument: str) -> None:
    name, _, rest = argument.partition(" ")
    option = option_named(name)
    value: Any = getattr(session.base_options, option.field)
    try:
        value = option.from_text(rest.strip()) if rest.strip() else value
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{option.name}: {error.message}") from error
    session.options = checked(dataclasses.replace(session.options, **{option.field: value}))


def _show(session: "ChatSession", _: str) -> None:
    session.note(f"model: {session.model.engine.model}, context {session.model.engine.max_model_len} tokens")
    session.note(f"system: {session.conversation.system or '-'}")
    session.note(f"messages: {len(session.conversation.turns)}")
    for option in OPTIONS:
        value = getattr(session.options, option.field)
        if option.field != "guidance":
            session.note(f"{option.name}: {'-' if value is None or value in ((), {}) else value}")
    guidance = session.options.guidance
    session.note(f"guidance: {'-' if guidance is None else _shown(guidance)}")


def _shown(guidance: "Guidance") -> str:
    return f"{guidance.kind.value} {guidance.text or ' '.join(map(repr, guidance.choices))}".strip()


def _save(session: "ChatSession", path: str) -> None:
    save_messages(path, session.conversation.messages)
    session.note(f"({len(session.conversation.messages)} messages written)")


def _load(session: "ChatSession", path: str) -> None:
    session.conversation.replace(load_messages(path))
    session.unanswered = None
    session.note(f"({len(session.conversation.messages)} messages read)")


def _tokens(session: "ChatSession", _: str) -> None:
    total = 0
    for message in session.conversation.messages:
        count = len(session.client.tokenize(message.content, add_special_tokens=False))
        session.note(f"{count:8}  {message.role}")
        total += count
    session.note(f"{total:8}  in all, the template's own aside, of {session.model.engine.max_model_len}")
    if (usage := session.usage) is not None:
        session.note(
            f"last answer: {usage.num_output_tokens} tokens to {usage.num_prompt_tokens} of prompt "
            f"({usage.num_cached_tokens} found in the prefix cache)"
        )


def _quit(session: "ChatSession", _: str) -> None:
    session.is_over = True


COMMANDS = (
    ChatCommand("/help", "", "this text", _help),
    ChatCommand("/system", "[TEXT]", "instruction that stands before all turns; none without a text", _system),
    ChatCommand("/reset", "", "forget the conversation, but not the system message", _reset),
    ChatCommand("/undo", "", "take back the last question and its answer", _undo),
    ChatCommand("/retry", "", "answer the last question again", _retry),
    ChatCommand("/set", "NAME [VALUE]", "change an option, as on the command line; without a value: as at first", _set),
    ChatCommand("/show", "", "model, system message and options", _show),
    ChatCommand("/save", "FILE", "write the conversation as JSON", _save),
    ChatCommand("/load", "FILE", "go on with a conversation from such a file", _load),
    ChatCommand("/tokens", "", "count the tokens of the conversation", _tokens),
    ChatCommand("/quit", "", "leave, as Ctrl-D does", _quit),
)
