"""Messages from lines: how one goes on over several, line editing, and the lines of earlier conversations.

Lines come from a function like ``input``; a terminal's are edited by readline, where Python has it.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

__all__ = ["MessageReader", "history_path", "line_editing"]

_BLOCK = '"""'
_MAX_HISTORY_LINES = 2000


class MessageReader:
    """Reads messages of one line or more.

    A line that ends with a backslash goes on with the next one. What stands between three quotation marks may have any
    lines and is never a command. Errors: those of the function; ``EOFError`` only where nothing of a message is there.
    """

    def __init__(self, read_line: Callable[[str], str], *, prompt: str = "", more: str = "") -> None:
        """``prompt`` stands before a message, ``more`` before each line that it goes on with."""
        self._read_line = read_line
        self._prompt = prompt
        self._more = more

    def read(self) -> str:
        """Return the next message, without blanks around it; ``/`` begins a command, ``//`` a message with a slash."""
        line = self._read_line(self._prompt)
        if line.lstrip().startswith(_BLOCK):
            return self._read_block(line.lstrip().removeprefix(_BLOCK))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            try:
                lines.append(self._read_line(self._more))
            except EOFError:
                break
        return "\n".join(lines).strip()

    def _read_block(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(_BLOCK):
            try:
                lines.append(self._read_line(self._more))
            except EOFError:
                lines.append(_BLOCK)
        lines[-1] = lines[-1].rstrip().removesuffix(_BLOCK)
        text = "\n".join(lines).strip()
        return f"/{text}" if text.startswith("/") else text


def history_path(environment: Mapping[str, str]) -> Path:
    """Where the lines of earlier conversations are kept, in the user's folder for state."""
    state = environment.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "orca" / "chat_history"


@contextlib.contextmanager
def line_editing(history: Path | None, complete: Callable[[str, str], list[str]]) -> Iterator[None]:
    """Edit the lines that ``input`` reads inside the block; with ``history``, remember them beyond it.

    ``complete`` returns what a word may become, from the line before it and its begin. The file is only the user's to
    read; where it cannot be read or written, there is no memory.
    """
    try:
        import readline
    except ImportError:
        yield
        return

    def completion(word: str, index: int) -> str | None:
        found = complete(readline.get_line_buffer()[: readline.get_begidx()], word)
        return found[index] if index < len(found) else None

    readline.set_completer_delims(" ")
    readline.set_completer(completion)
    readline.parse_and_bind("tab: complete")
    readline.clear_history()
    if history is not None:
        with contextlib.suppress(OSError):
            readline.read_history_file(history)
    num_known = readline.get_current_history_length()
    try:
        yield
    finally:
        readline.set_completer(None)
        if history is not None and (num_new := readline.get_current_history_length() - num_known) > 0:
            with contextlib.suppress(OSError):
                history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.close(os.open(history, os.O_CREAT | os.O_WRONLY, 0o600))
                readline.set_history_length(_MAX_HISTORY_LINES)
                # Another conversation may have written meanwhile.
                readline.append_history_file(num_new, history)
