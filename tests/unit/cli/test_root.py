from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import typer.main
from typer.testing import CliRunner

from services.cli.main import app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.unit.cli.conftest import Outcome  # only for the type checker

COMMANDS = {"up", "models", "generate", "chat", "status", "top", "bench", "gateway", "scheduler", "worker", "health"}


def commands() -> Iterator[tuple[str, Any]]:
    root: Any = typer.main.get_command(app)
    for name, command in root.commands.items():
        subcommands = getattr(command, "commands", None)
        if subcommands is None:
            yield name, command
        else:
            yield from ((f"{name} {sub}", subcommand) for sub, subcommand in subcommands.items())


def test_all_commands_are_there() -> None:
    assert {name.split()[0] for name, _ in commands()} == COMMANDS


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=[name for name, _ in commands()])
def test_every_command_and_option_is_explained(name: str, command: Any) -> None:
    assert command.help, name
    unexplained = [param.name for param in command.params if not getattr(param, "help", None)]
    assert not unexplained


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=[name for name, _ in commands()])
def test_help_is_shown_by_both_spellings(name: str, command: Any) -> None:
    runner = CliRunner()
    short, long = (runner.invoke(app, [*name.split(), flag]) for flag in ("-h", "--help"))
    assert short.exit_code == long.exit_code == 0
    assert short.output == long.output
    assert command.help.split(".")[0].split()[0] in short.output


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=[name for name, _ in commands()])
def test_help_is_printed_as_it_is_written(name: str, command: Any) -> None:
    """Brackets that are not escaped would be taken for markup, and vanish."""
    result = CliRunner().invoke(app, [*name.split(), "-h"], env={"COLUMNS": "2000"})
    printed = " ".join(result.output.split())
    for text in (command.help, *(param.help for param in command.params if not getattr(param, "hidden", False))):
        for paragraph in text.split("\n\n"):
            assert " ".join(paragraph.replace("\\[", "[").split()) in printed


def test_the_command_alone_shows_help() -> None:
    result = CliRunner().invoke(app, [])
    assert "Exit codes: 0 done, 1 failed, 2 options that cannot work, 130 interrupted." in result.output
    assert all(name in result.output for name in COMMANDS)


def test_version(orca: Callable[..., Outcome]) -> None:
    outcome = orca("--version")
    assert outcome.exit_code == 0
    assert outcome.out.startswith("orca 0.")


@pytest.mark.parametrize("service", ["gateway", "scheduler", "worker"])
def test_every_service_option_has_an_environment_variable(service: str) -> None:
    command = dict(commands())[service]
    without = {param.name for param in command.params if not param.envvar} - {"help"}
    assert without == {"exit_with_parent"}
    assert all(param.envvar.startswith("ORCA_") for param in command.params if param.envvar)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gateway", "--scheduler", "nonsense"), "--scheduler must be HOST:PORT, not 'nonsense'"),
        (("worker", "--scheduler", "a:1", "--device", "tpu"), "--device must be one of auto, cpu, cuda, not 'tpu'"),
        (("worker", "--scheduler", "a:1", "--host", "0.0.0.0"), "--advertise-host is needed"),
        (("scheduler", "--stages", "0"), "--stages must be between 1 and 1024, not 0"),
        (("scheduler", "--dtype", "int3"), "--dtype must be one of"),
        (("up", "--max-batch-size", "0"), "--max-batch-size must be between"),
    ],
)
def test_options_that_cannot_work_are_one_clear_line(
    orca: Callable[..., Outcome], arguments: tuple[str, ...], said: str
) -> None:
    outcome = orca(*arguments)
    assert outcome.exit_code == 2
    assert outcome.out == ""
    assert outcome.err.startswith(f"error: {said}")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [("gateway",), ("scheduler", "--port", "70000"), ("scheduler", "--kv-memory", "much"), ("nonsense",), ("up", "x")],
)
def test_usage_errors_leave_with_2(orca: Callable[..., Outcome], arguments: tuple[str, ...]) -> None:
    outcome = orca(*arguments)
    assert outcome.exit_code == 2
    assert "Usage: orca" in outcome.err
