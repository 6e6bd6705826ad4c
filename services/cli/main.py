"""The root of the ``orca`` command: what commands there are, and how a failure ends the process.

Everything heavy is imported inside the command that needs it: ``orca --help`` answers at once and never sees torch.
"""

import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from services.cli.bench import bench
from services.cli.chat import chat
from services.cli.generate import generate
from services.cli.health import health
from services.cli.models import models
from services.cli.service_commands import gateway, scheduler, worker
from services.cli.status import status
from services.cli.top import top
from services.cli.up import up
from shared.errors import ConfigError, OrcaError

__all__ = ["app", "main"]

_SERVE = "Serve"
_SERVICES = "Single services (one process each; `orca up` starts them all)"
_USE = "Use"

app = typer.Typer(
    name="orca",
    help="ORCA-style serving of Transformer language models as a mesh of small services.",
    epilog="Exit codes: 0 done, 1 failed, 2 options that cannot work, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(rich_help_panel=_SERVE)(up)
app.add_typer(models, rich_help_panel=_SERVE)
app.command(rich_help_panel=_USE)(generate)
app.command(rich_help_panel=_USE)(chat)
app.command(rich_help_panel=_USE)(status)
app.command(rich_help_panel=_USE)(top)
app.add_typer(bench, rich_help_panel=_USE)
app.command(rich_help_panel=_SERVICES)(gateway)
app.command(rich_help_panel=_SERVICES)(scheduler)
app.command(rich_help_panel=_SERVICES)(worker)
app.command(rich_help_panel=_SERVICES)(health)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"orca {version('orca-mesh')}")
        raise typer.Exit


@app.callback()
def _root(
    _: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process; without ``arguments``, those of the process."""
    # gRPC's C core would write past our logs and into a client's text; failures come back as typed errors anyway.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Processes are only ever spawned. gRPC's handlers would run in the child before it becomes another program, and
    # crash there while other threads use gRPC.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - for the life of the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an output may have any character, the terminal's encoding may not
    try:
        app(args=arguments, prog_name="orca")
    except ConfigError as error:
        _fail(error, 2)
    except (OrcaError, OSError) as error:
        _fail(error, 1)


def _fail(error: OrcaError | OSError, exit_code: int) -> None:
    typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
    typer.echo(str(error), err=True)
    sys.exit(exit_code)
