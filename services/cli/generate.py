"""``orca generate``: continue a prompt, text as it comes."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.calls import told_plainly
from services.cli.connection import Connection, takes_connection
from services.cli.generation_options import takes_generation
from services.cli.option_values import token_ids as parse_token_ids
from shared.generation import GenerateOptions, GenerateRequest

__all__ = ["generate"]

_MAX_PROMPT_BYTES = 32 << 20
"""No context is that long; a message to the gateway could have twice as much."""


@takes_connection
@takes_generation(GenerateOptions(max_tokens=128))
def generate(
    options: GenerateOptions,
    connection: Connection,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="Text to continue; without it, or as -, standard input is read."),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file", "-f", metavar="PATH", show_default=False, help="Read the prompt from a file; - is standard input."
        ),
    ] = None,
    token_ids: Annotated[
        Any,
        typer.Option(
            "--token-ids",
            metavar="IDS",
            parser=parse_token_ids,
            show_default=False,
            help="The prompt as token ids, for example 1,2,3.",
        ),
    ] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Begin each output with the prompt.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line for each delta; the last has the usage.")
    ] = False,
) -> None:
    """Continue a prompt and stream the text. Ctrl-C cancels the request.

    One line end at the end of a file or of standard input does not belong to the prompt.
    """
    request = GenerateRequest([_read_prompt(prompt, file, token_ids)], options, echo)
    from rich.console import Console

    from services.cli.answers import AnswerPrinter
    from services.cli.delta_json import delta_line

    console = Console()
    printer = AnswerPrinter(console, options, ends_line=console.is_terminal)
    with told_plainly(connection.address), connection.open() as client, client.generate(request) as deltas:
        if as_json:
            for delta in deltas:
                sys.stdout.write(delta_line(delta) + "\n")
                sys.stdout.flush()
            return
        try:
            for delta in deltas:
                printer.add(delta)
        finally:
            printer.close()


def _read_prompt(prompt: str | None, file: str | None, token_ids: list[int] | None) -> str | list[int]:
    ways = (("PROMPT", prompt), ("--file", file), ("--token-ids", token_ids))
    given = [name for name, value in ways if value is not None]
    if len(given) > 1:
        raise typer.BadParameter(f"give either {' or '.join(given)}, not both")
    if token_ids is not None:
        return token_ids
    if prompt is not None and prompt != "-":
        return prompt
    if file is None and prompt is None and sys.stdin.isatty():
        raise typer.BadParameter('give a prompt, for example: orca generate "Once upon a time"')
    try:
        if file in {None, "-"}:
            data = sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1)
        else:
            with Path(str(file)).open("rb") as opened:
                data = opened.read(_MAX_PROMPT_BYTES + 1)
        if len(data) > _MAX_PROMPT_BYTES:
            raise typer.BadParameter(f"the prompt has more than {_MAX_PROMPT_BYTES} bytes")
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"the prompt is not UTF-8 text (byte {error.start})") from error
