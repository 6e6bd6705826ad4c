"""``orca models``: what the catalogue has, and fetching it with a progress bar."""

from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from shared.model.store import PullProgress, PullStage

__all__ = ["make_available", "models"]

models = typer.Typer(name="models", help="List and fetch models.", no_args_is_help=True)


@models.command("list")
def list_command() -> None:
    """List the models that can be fetched by name, and which of them are here."""
    from rich.console import Console
    from rich.table import Table

    from shared.model.store import list_models

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("model", "state", "size", "licence", "description"):
        table.add_column(column)
    for model in list_models():
        table.add_row(model.name, model.state.value, format_size(model.size_bytes), model.licence, model.description)
    Console().print(table)


@models.command()
def pull(name: Annotated[str, typer.Argument(metavar="NAME", help="A name of `orca models list`.")]) -> None:
    """Fetch a model; one that is here already is only checked."""
    from rich.console import Console

    console = Console()
    path = pull_with_progress(name, console)
    console.print(f"{name} is ready: {path}", soft_wrap=True, markup=False, highlight=False)


def make_available(name: str, console: "Console") -> None:
    """Fetch the model called ``name`` where the catalogue has it and this host does not.

    Raises ``ModelError`` or ``ConfigError`` where no worker could load it; so that this is told before any is started.
    """
    from shared.model.store import ModelState, list_models, resolve

    if any(model.name == name and model.state is ModelState.NOT_DOWNLOADED for model in list_models()):
        pull_with_progress(name, console)
    resolve(name)


def pull_with_progress(name: str, console: "Console") -> "Path":
    """Fetch a model of the catalogue with a progress bar; without a terminal, with one line for each stage of it."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from shared.model.store import pull as fetch

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=None)
        stage: PullStage | None = None

        def show(progress: "PullProgress") -> None:
            nonlocal stage
            what = f"{name}: {progress.stage.value}"
            if progress.stage is not stage and not console.is_terminal:
                size = f" ({format_size(progress.total_bytes)})"
                console.print(what + size, soft_wrap=True, markup=False, highlight=False)
            if progress.stage is not stage:
                bar.reset(task, description=what)
            stage = progress.stage
            bar.update(task, completed=progress.done_bytes, total=progress.total_bytes)

        return fetch(name, progress=show)
