"""A conversation at work: messages and commands come in, answers stream out.

Knows neither where lines come from nor what a terminal is: it gets both, so that tests have it without one.
"""

from typing import TYPE_CHECKING

import typer

from services.cli.answers import AnswerPrinter
from services.cli.calls import told_plainly
from services.cli.chat_commands import command_named
from services.cli.conversation import Conversation
from shared.errors import InvalidRequestError, OrcaError
from shared.messages import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from shared.generation import GenerateOptions, ModelInfo, Usage
    from shared.sync_client import SyncGatewayClient

__all__ = ["ChatSession"]

_INTERRUPTED = 130


class ChatSession:
    """A conversation with one model."""

    def __init__(
        self,
        client: "SyncGatewayClient",
        model: "ModelInfo",
        options: "GenerateOptions",
        conversation: Conversation,
        *,
        address: str,
        console: "Console",
        notes: "Console",
    ) -> None:
        """``console`` gets the answers, ``notes`` all else; ``address`` is the gateway's."""
        self.client = client
        self.model = model
        self.base_options = options
        """As the conversation began."""
        self.options = options
        self.conversation = conversation
        self.unanswered: str | None = None
        """The last question, where it has got no answer."""
        self.usage: Usage | None = None
        """Of the last answer."""
        self.is_over = False
        self._address = address
        self._console = console
        self._notes = notes
        self._num_interrupts = 0
        """Since the last line."""

    def run(self, read: "Callable[[], str]", *, is_script: bool) -> int:
        """Read and answer until there is nothing more or the user leaves; return the exit code.

        A script ends with its first error, and with Ctrl-C. For people Ctrl-C stops an answer, twice it leaves.
        """
        while not self.is_over:
            try:
                text = read()
                self._num_interrupts = 0
                with told_plainly(self._address):
                    self.take(text)
            except EOFError:
                if not is_script:
                    self.note("")
                break
            except KeyboardInterrupt:
                self._num_interrupts += 1
                if not is_script and self._num_interrupts == 1:
                    self.note("\n(Ctrl-C again, Ctrl-D or /quit leaves)")
            except (OrcaError, typer.BadParameter, UnicodeDecodeError) as error:
                self._notes.print(f"error: {_said(error)}", style="red", markup=False, highlight=False, soft_wrap=True)
                if is_script:
                    return 1
            if self._num_interrupts > (0 if is_script else 1):
                return _INTERRUPTED
        return 0

    def take(self, text: str) -> None:
        """Do what a command says, or ask. Raises ``typer.BadParameter`` for commands that cannot be."""
        if text.startswith("/") and not text.startswith("//"):
            name, *rest = text.split(maxsplit=1)
            command = command_named(name)
            argument = "".join(rest)
            if argument and not command.argument:
                raise typer.BadParameter(f"{name} takes nothing after it")
            if not argument and command.argument and not command.argument.startswith("["):
                raise typer.BadParameter(f"write {name} {command.argument}")
            command.run(self, argument)
        elif text:
            self.ask(text.removeprefix("/") if text.startswith("//") else text)

    def ask(self, question: str) -> None:
        """Stream the answer; both belong to the conversation once there is some of it.

        Raises:
            OrcaError: the answer failed, and the conversation is as before.
        """
        from shared.generation import ChatMessage

        self.unanswered = question
        printer = AnswerPrinter(self._console, self.options, ends_line=True)
        try:
            messages = [*self.conversation.messages, ChatMessage("user", question)]
            with self.client.chat(messages, self.options) as deltas:
                for delta in deltas:
                    printer.add(delta)
        except KeyboardInterrupt:
            self._num_interrupts = 1
        except InvalidRequestError as error:
            if self.conversation.turns and ("context" in str(error) or "K/V slots" in str(error)):
                raise InvalidRequestError(f"{error}. /undo or /reset makes room") from error
            raise
        finally:
            printer.close()
        if self._num_interrupts:
            self.note("(stopped)")
        if printer.text or not self._num_interrupts:
            self.conversation.add(question, printer.text)
            self.unanswered = None
        self.usage = printer.usage or self.usage
        self._tell_end(printer)

    def note(self, text: str) -> None:
        """Tell the user something that is no answer."""
        self._notes.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    def _tell_end(self, printer: AnswerPrinter) -> None:
        if printer.finish is not None and printer.finish.reason is FinishReason.LENGTH:
            is_cut = self.options.max_tokens is not None
            self.note(
                "(cut: /set max-tokens COUNT allows more)"
                if is_cut
                else "(the context is full: /undo or /reset makes room)"
            )
        if self.options.n > 1 and not self._num_interrupts:
            self.note("(the conversation goes on with choice 1)")


def _said(error: OrcaError | typer.BadParameter | UnicodeDecodeError) -> str:
    match error:
        case UnicodeDecodeError():
            return f"the line is not UTF-8 text (byte {error.start})"
        case typer.BadParameter():
            return error.message
    return str(error)
