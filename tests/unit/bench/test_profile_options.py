"""What `bench.profile_iteration` makes of its options, of the kernels' choice of threads, and of its document."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from bench import profile_iteration
from bench.profile_iteration import parse, profile, replace_tables

if TYPE_CHECKING:
    from pathlib import Path

    from services.mesh.options import MeshOptions


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--requests", "1", "16", "--threads", "1"), "--threads has as many numbers"),
        (("--threads", "1", "2"), "--threads has as many numbers"),
        (("--requests", "0"), "at least 1"),
        (("--requests", "1", "--threads", "-1"), "at least 1"),
        (("--iterations", "1"), "--iterations is 2 to"),
        (("--iterations", "5000"), "--iterations is 2 to"),
    ],
)
def test_what_cannot_be_measured_is_told_at_once(
    arguments: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert error in capsys.readouterr().err


def test_all_cpus_may_compute_by_default() -> None:
    parsed = parse(("--requests", "2", "3"))
    assert parsed.threads == [len(os.sched_getaffinity(0))] * 2


def test_mesh_and_parts_may_use_the_same_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    async def mesh(_num_requests: int, _num_iterations: int, options: MeshOptions) -> SimpleNamespace:
        asked.append(options.threads_per_worker)
        return SimpleNamespace(batch_size=2)

    def parts(_num_sequences: int, _context: int, threads: int, _repeats: int) -> None:
        asked.append(threads)

    monkeypatch.setattr(profile_iteration, "profile_mesh", mesh)
    monkeypatch.setattr(profile_iteration, "python_parts", lambda *_: {})
    model: Any = SimpleNamespace(profile=parts)
    profile(2, 10, model, 3)
    assert asked == [3, 3]


def test_write_needs_the_marks_in_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parse(("--write",))  # the real one has them
    document = tmp_path / "performance.md"
    document.write_text("# Where the time goes\n", encoding="utf-8")
    monkeypatch.setattr(profile_iteration, "_DOCUMENT", document)
    with pytest.raises(SystemExit):
        parse(("--write",))
    assert "<!-- measured: begin -->" in capsys.readouterr().err


def test_tables_take_the_place_of_those_before() -> None:
    document = "a\n<!-- measured: begin -->\nold\n<!-- measured: end -->\nb\n"
    assert replace_tables(document, "new\n") == document.replace("old", "new")
    with pytest.raises(ValueError, match="has no lines"):
        replace_tables("a\nb\n", "new\n")
