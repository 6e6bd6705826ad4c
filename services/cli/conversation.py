"""The turns of a conversation: what the model is asked, what can be taken back, and its file.

The file is JSON: a list of messages as OpenAI's API has them. Knows neither the terminal nor a gateway.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from shared.generation import ChatMessage, ToolCall

__all__ = ["Conversation", "load_messages", "save_messages"]

MAX_FILE_BYTES = 4 << 20
MAX_MESSAGES = 10_000


class Conversation:
    """A system message, or none, and the turns after it."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[ChatMessage] = []

    @property
    def messages(self) -> list[ChatMessage]:
        """All of it, as the model gets it."""
        return [*([] if self.system is None else [ChatMessage("system", self.system)]), *self.turns]

    def replace(self, messages: Sequence[ChatMessage]) -> None:
        """Go on from these messages; a system message at their begin becomes the conversation's own."""
        has_system = bool(messages) and messages[0].role == "system"
        self.system = messages[0].content if has_system else None
        self.turns = [*messages[has_system:]]

    def add(self, question: str, answer: str) -> None:
        """Add an exchange."""
        self.turns += [ChatMessage("user", question), ChatMessage("assistant", answer)]

    def take_back(self) -> str | None:
        """Remove the last question of the user's and all after it; return it, or None where there is none."""
        for index in reversed(range(len(self.turns))):
            if self.turns[index].role == "user":
                question = self.turns[index].content
                del self.turns[index:]
                return question
        return None


def save_messages(path: str, messages: Sequence[ChatMessage]) -> None:
    """Write a file, over what is there. Raises ``typer.BadParameter`` where that is not possible."""
    text = json.dumps([_to_json(message) for message in messages], indent=2, ensure_ascii=False)
    try:
        Path(path).expanduser().write_text(text + "\n", encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        raise typer.BadParameter(f"cannot write {path!r}: {getattr(error, 'strerror', None) or error}") from error


def load_messages(path: str) -> list[ChatMessage]:
    """Read a file. Raises ``typer.BadParameter`` for one that cannot be read, is too large or no list of messages."""
    try:
        with Path(path).expanduser().open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:
        raise typer.BadParameter(f"cannot read {path!r}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise typer.BadParameter(f"{path!r} has more than {MAX_FILE_BYTES} bytes")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{path!r} is not JSON: {error}") from error
    if not isinstance(content, list) or len(content) > MAX_MESSAGES:
        raise typer.BadParameter(f"{path!r} is not a list of at most {MAX_MESSAGES} messages")
    return [_from_json(f"{path!r}: message {index}", item) for index, item in enumerate(content)]


def _to_json(message: ChatMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        fields["name"] = message.name
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return fields


def _from_json(where: str, item: object) -> ChatMessage:
    fields = _mapping(where, item)
    role = _text(where, fields, "role")
    if not role:
        raise typer.BadParameter(f"{where} has no role")
    calls = fields.get("tool_calls") or []
    if not isinstance(calls, list):
        raise typer.BadParameter(f"{where}: tool_calls is not a list")
    return ChatMessage(
        role,
        _text(where, fields, "content"),
        tuple(_tool_call(f"{where}, tool call {index}", call) for index, call in enumerate(calls)),
        _text(where, fields, "tool_call_id"),
        _text(where, fields, "name"),
    )


def _tool_call(where: str, item: object) -> ToolCall:
    fields = _mapping(where, item)
    function = _mapping(where, fields.get("function"))
    return ToolCall(_text(where, fields, "id"), _text(where, function, "name"), _text(where, function, "arguments"))


def _mapping(where: str, item: object) -> Mapping[str, object]:
    if not isinstance(item, dict):
        raise typer.BadParameter(f"{where} is not a JSON object")
    return item


def _text(where: str, fields: Mapping[str, object], name: str) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise typer.BadParameter(f"{where}: {name} is not a text")
    return value
