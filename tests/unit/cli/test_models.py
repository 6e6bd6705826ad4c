from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from services.cli.models import make_available
from shared.errors import ModelError, ModelNotFoundError
from shared.model.catalogue import CATALOGUE
from shared.model.download import PullProgress, PullStage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.cli.conftest import Outcome  # only for the type checker

NAME = CATALOGUE[0].name


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """An empty ORCA home, and a catalogue whose models arrive at once; the names that were fetched."""
    monkeypatch.setenv("ORCA_HOME", str(tmp_path))
    fetched: list[str] = []

    def fetch(model: object, target: Path, progress: Callable[[PullProgress], None]) -> None:
        for stage, done in ((PullStage.DOWNLOADING, 0), (PullStage.DOWNLOADING, 50), (PullStage.UNPACKING, 100)):
            progress(PullProgress(stage, done, 100))
        target.parent.mkdir(parents=True)
        with target.open("wb") as file:
            file.write(b"GGUF")
            file.truncate(CATALOGUE[0].size_bytes)
        fetched.append(target.parent.name)

    monkeypatch.setattr("shared.model.store.fetch", fetch)
    return fetched


def test_list(orca: Callable[..., Outcome], pulled: list[str]) -> None:
    outcome = orca("models", "list")
    assert outcome.exit_code == 0
    assert NAME in outcome.out
    assert "not downloaded" in outcome.out
    orca("models", "pull", NAME)
    assert "not downloaded" not in orca("models", "list").out


def test_pull_without_a_terminal_is_a_line_for_each_stage(
    orca: Callable[..., Outcome], pulled: list[str], tmp_path: Path
) -> None:
    outcome = orca("models", "pull", NAME)
    assert outcome.exit_code == 0
    lines = outcome.out.splitlines()
    assert lines[:2] == [f"{NAME}: downloading (100 B)", f"{NAME}: unpacking (100 B)"]
    assert lines[2].startswith(f"{NAME} is ready: {tmp_path}")


def test_pull_on_a_terminal_is_a_bar(pulled: list[str]) -> None:
    screen = io.StringIO()
    make_available(NAME, Console(file=screen, force_terminal=True, width=120))
    assert "━" in screen.getvalue()
    assert pulled == [NAME]


def test_only_what_is_missing_is_fetched(pulled: list[str]) -> None:
    console = Console(file=io.StringIO())
    for _ in range(2):
        make_available(NAME, console)
    make_available("synthetic:step_ms=1", console)
    make_available("random:tiny", console)
    assert pulled == [NAME]


def test_unknown_names_fail_before_anything_is_started(orca: Callable[..., Outcome], pulled: list[str]) -> None:
    with pytest.raises(ModelNotFoundError, match="no model is called 'smollm3'"):
        make_available("smollm3", Console(file=io.StringIO()))
    outcome = orca("models", "pull", "smollm3")
    assert outcome.exit_code == 1
    assert outcome.err.startswith("error: no model is called 'smollm3' (did you mean")
    assert pulled == []


def test_a_pull_that_fails_is_told(
    orca: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fetch(model: object, target: Path, progress: object) -> None:
        raise ModelError("the disk is full")

    monkeypatch.setenv("ORCA_HOME", str(tmp_path))
    monkeypatch.setattr("shared.model.store.fetch", fetch)
    assert orca("models", "pull", NAME) == (1, "", "error: the disk is full\n")
