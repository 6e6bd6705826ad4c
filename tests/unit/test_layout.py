"""The shape of the tree: what is where, how large a module may be, what it must say and must not contain."""

from __future__ import annotations

import ast
import itertools
import re
import tomllib
from importlib import import_module
from pathlib import Path

import pathspec
import pytest

ROOT = Path(__file__).parents[2]
OURS = ("shared", "services", "kernels")
SHIPPED = (*OURS, "bench/load")
"""What a wheel has; of bench only what the command line needs."""
MODULES = sorted(
    path.relative_to(ROOT).as_posix()
    for tree in SHIPPED
    for path in (ROOT / tree).rglob("*.py")
    if not path.relative_to(ROOT).as_posix().startswith("shared/pb/")
)
MAX_LINES = 400
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base"}

# Put together here, so that this file does not contain what it looks for.
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b|raise Not" r"ImplementedError")
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:home|root|Users|work)/\w+")


@pytest.mark.parametrize("path", MODULES)
def test_module(path: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(source)), "a module says what it is"
    assert source.count("\n") <= MAX_LINES, "one module, one concept"
    assert Path(path).stem not in VAGUE_NAMES, "a name that says nothing"
    assert not UNFINISHED.search(source)
    assert not MACHINE_PATHS.search(source)


@pytest.mark.parametrize("tree", SHIPPED)
def test_packages_are_whole(tree: str) -> None:
    assert (ROOT / tree.partition("/")[0] / "py.typed").is_file()
    folders = {path.parent for path in (ROOT / tree).rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def test_contracts_are_contracts_only() -> None:
    assert {path.suffix for path in (ROOT / "proto").iterdir()} == {".proto"}


@pytest.mark.parametrize("path", sorted((ROOT / "proto").glob("*.proto")), ids=lambda path: path.name)
def test_every_contract_is_versioned_and_commented(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert "package orca.v1;" in source
    lines = source.splitlines()
    uncommented = [
        line.strip()
        for above, line in itertools.pairwise(lines)
        if re.match(r"\s*rpc ", line) and not above.strip().startswith("//")
    ]
    assert not uncommented


def test_unit_tests_have_no_packages() -> None:
    # importmode=importlib: file names may repeat, and a package would make them clash.
    assert not list((ROOT / "tests" / "unit").rglob("__init__.py"))


def test_the_project_says_where_it_begins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == [*OURS, "bench"]
    assert "Private :: Do Not Upload" in project["project"]["classifiers"]
    module, _, function = project["project"]["scripts"]["orca"].partition(":")
    assert callable(getattr(import_module(module), function))


def test_of_bench_a_wheel_has_what_the_command_line_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    excluded = pathspec.GitIgnoreSpec.from_lines(project["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"])
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "bench").rglob("*") if path.is_file()}
    kept = {name for name in files if "__pycache__" not in name and not excluded.match_file(name)}
    load = {path.relative_to(ROOT).as_posix() for path in (ROOT / "bench/load").glob("*.py")}
    assert kept == {"bench/__init__.py", "bench/py.typed", *load}


def test_newcomers_find_their_two_commands() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^up:", makefile, re.MULTILINE)
    assert re.search(r"^test:", makefile, re.MULTILINE)


def test_ci_runs_what_developers_run() -> None:
    script = ROOT / ".ci" / "run"
    text = script.read_text(encoding="utf-8")
    assert script.stat().st_mode & 0o111, "it is executable"
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    assert "make test" in text
