"""The table of cases is true: every number is there, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
NUMBERS = [
    *("1", "3", "4", "5", "7", "8", "9", "11", "12", "14", "16", "17", "19", "21", "22", "24", "26", "27", "29"),
    *("30", "32", "33", "35", "36", "38", "39", "40"),
    *("R2", "R3", "R5", "R6", "R7", "R9", "R10", "R11", "R13", "R15"),
]
TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


@cache
def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def rows() -> dict[str, str]:
    return dict(re.findall(r"^\| (R?\d+) \| (.*) \|$", TABLE, re.MULTILINE))


def test_every_case_is_there_once_and_in_order() -> None:
    assert re.findall(r"^\| (R?\d+) \|", TABLE, re.MULTILINE) == NUMBERS


@pytest.mark.parametrize("number", NUMBERS)
def test_every_case_has_tests_and_they_exist(number: str) -> None:
    said, _, named = rows()[number].rpartition(" | ")
    assert said.endswith("."), "what holds is said in sentences"
    found = TEST.findall(named)
    assert found
    assert named == " ".join(f"`{file}::{test}`" for file, test in found), "nothing but tests stands in the last column"


def test_every_named_test_exists() -> None:
    missing = [
        f"{file}::{test}"
        for file, test in TEST.findall(TABLE)
        if not (ROOT / "tests" / file).is_file() or test not in names_in(ROOT / "tests" / file)
    ]
    assert not missing
