"""``orca chat``: a conversation on the terminal, through the model's own chat template."""

import contextlib
import os
import sys
from typing import Annotated

import typer

from services.cli.calls import told_plainly
from services.cli.connection import Connection, takes_connection
from services.cli.generation_options import takes_generation
from shared.errors import InvalidRequestError
from shared.generation import GenerateOptions

__all__ = ["chat"]


@takes_connection
@takes_generation(GenerateOptions(temperature=0.7, top_p=0.95))
def chat(
    options: GenerateOptions,
    connection: Connection,
    system: Annotated[
        str | None, typer.Option("--system", "-s", show_default=False, help="Instruction that stands before all turns.")
    ] = None,
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Do not remember what is typed for later conversations.")
    ] = False,
) -> None:
    """Talk with the model. Ctrl-C stops an answer, Ctrl-D leaves; /help tells more.

    Without a terminal, standard input is a script of messages and /commands, which ends with its first error.
    """
    from rich.console import Console

    from services.cli.chat_commands import complete
    from services.cli.chat_session import ChatSession
    from services.cli.conversation import Conversation
    from services.cli.line_input import MessageReader, history_path, line_editing

    notes = Console(stderr=True)
    is_script = not sys.stdin.isatty()
    address = connection.address
    with told_plainly(address), connection.open() as client:
        model = client.model_info()
        if not model.has_chat_template:
            raise InvalidRequestError(f"{model.engine.model} has no chat template: use `orca generate` instead")
        session = ChatSession(
            client, model, options, Conversation(system), address=address, console=Console(), notes=notes
        )
        editing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if not is_script:
            session.note(f"{model.engine.model}; /help tells what else can be typed")
            editing = line_editing(None if no_history else history_path(os.environ), complete)
        # Without a terminal on both ends, input() would write the prompt into the answers.
        prompts = ("> ", ". ") if not is_script and sys.stdout.isatty() else ("", "")
        reader = MessageReader(input, prompt=prompts[0], more=prompts[1])
        with editing:
            exit_code = session.run(reader.read, is_script=is_script)
    raise typer.Exit(exit_code)
