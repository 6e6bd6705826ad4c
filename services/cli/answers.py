"""Answers on the terminal: text as it comes, choice after choice, and how likely each token was.

Standard output gets the text as it is; a terminal gets it without what would steer it.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from shared.generation import Delta, Finish, GenerateOptions, TokenLogprob, Usage

__all__ = ["AnswerPrinter"]

_PLAIN = str.maketrans(
    {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
    | {0x7F: 0x2421}
    | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
)
"""Control characters to pictures of them: an output must not move the cursor or retitle the window."""


@dataclass(slots=True)
class _Choice:
    waiting: list[str] = field(default_factory=list)
    """Text that is not printed yet."""
    logprobs: list["TokenLogprob"] = field(default_factory=list)
    finish: "Finish | None" = None
    has_begun: bool = False


class AnswerPrinter:
    """Prints the deltas of one request.

    The first choice is printed as it comes. Others have to wait until all before them have ended, and go on from there.
    """

    def __init__(self, console: "Console", options: "GenerateOptions", *, ends_line: bool) -> None:
        """``ends_line`` ends the last line even where the text does not."""
        self.usage: Usage | None = None
        self._console = console
        self._num_choices = options.n
        self._ends_line = ends_line or options.n > 1 or options.num_logprobs is not None
        self._choices: dict[int, _Choice] = {}
        self._current = 0
        self._first_text: list[str] = []
        self._is_line_open = False

    @property
    def text(self) -> str:
        """Text of the first choice so far."""
        return "".join(self._first_text)

    @property
    def finish(self) -> "Finish | None":
        """How the first choice ended, if it has."""
        return self._choices[0].finish if 0 in self._choices else None

    def add(self, delta: "Delta") -> None:
        """Print what can be printed."""
        self.usage = self.usage or delta.usage
        if not (delta.text or delta.token_ids or delta.finish):
            return
        choice = self._choices.setdefault(delta.choice, _Choice())
        choice.waiting.append(delta.text)
        choice.logprobs += delta.logprobs
        choice.finish = choice.finish or delta.finish
        if delta.choice == 0:
            self._first_text.append(delta.text)
        if delta.choice == self._current:
            self._catch_up()

    def close(self) -> None:
        """End the line, also of a request that has not come to its end."""
        if self._ends_line and self._is_line_open:
            self._write("\n")

    def _catch_up(self) -> None:
        while (choice := self._choices.get(self._current)) is not None:
            if self._num_choices > 1 and not choice.has_begun:
                self._console.rule(f"choice {self._current + 1} of {self._num_choices}", style="dim")
            choice.has_begun = True
            self._write("".join(choice.waiting))
            choice.waiting.clear()
            if choice.finish is None:
                return
            self.close()
            if choice.logprobs:
                self._console.print(_table(choice.logprobs))
            self._current += 1

    def _write(self, text: str) -> None:
        if text:
            file = self._console.file
            file.write(text.translate(_PLAIN) if self._console.is_terminal else text)
            file.flush()
            self._is_line_open = not text.endswith("\n")


def _table(logprobs: "Sequence[TokenLogprob]") -> "Table":
    from math import exp

    from rich.table import Table
    from rich.text import Text

    def share(logprob: float) -> str:
        return f"{exp(logprob):.1%}"

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("token")
    for column in ("id", "probability", "log"):
        table.add_column(column, justify="right")
    table.add_column("likeliest")
    for one in logprobs:
        table.add_row(
            Text(repr(one.token)),
            str(one.token_id),
            "" if one.logprob is None else share(one.logprob),
            "" if one.logprob is None else f"{one.logprob:.3f}",
            Text("  ".join(f"{other.token!r} {share(other.logprob)}" for other in one.top)),
        )
    return table
