"""shared/pb is what `make proto` makes of proto/, byte for byte."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTOS = sorted(path.name for path in (ROOT / "proto").glob("*.proto"))


def command_of_the_makefile() -> list[str]:
    """The recipe of `proto`, its variables filled in; the plugins are those beside this Python."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    match = re.search(r"^proto:.*\n\t(.+)$", makefile, re.MULTILINE)
    assert match is not None, "the Makefile has no recipe for `proto`"
    recipe = match[1].replace("$(PROTOS)", " ".join(f"shared/pb/{name}" for name in PROTOS))
    recipe = recipe.replace("$(BIN)/python", sys.executable).replace("$(BIN)", str(Path(sys.executable).parent))
    assert "$" not in recipe, f"a variable that this test does not know: {recipe}"
    return shlex.split(recipe)


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("regenerated")
    shutil.copytree(ROOT / "proto", folder / "proto")
    (folder / "shared" / "pb").mkdir(parents=True)
    subprocess.run(command_of_the_makefile(), cwd=folder, check=True, capture_output=True, text=True)
    return folder / "shared" / "pb"


def test_same_files(regenerated: Path) -> None:
    committed = {path.name for path in (ROOT / "shared" / "pb").iterdir() if path.suffix in {".py", ".pyi"}}
    assert committed - {"__init__.py"} == {path.name for path in regenerated.iterdir()}


@pytest.mark.parametrize("ending", ["_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi"])
@pytest.mark.parametrize("proto", PROTOS)
def test_same_bytes(regenerated: Path, proto: str, ending: str) -> None:
    name = proto.removesuffix(".proto") + ending
    assert (ROOT / "shared" / "pb" / name).read_bytes() == (regenerated / name).read_bytes(), "run `make proto`"
