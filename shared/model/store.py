"""From what a user types after ``--model`` to where the model is, and the folder of models that ORCA keeps.

Knows the spellings of a model's name and the layout of the ORCA home (``$ORCA_HOME``, else ``~/.cache/orca``)::

    <home>/models/<catalogue name>/<file>.gguf

Does not read weights, and does not know how a catalogue model is fetched (`shared.model.download`). Only `pull` and
`resolve` of an ``hf:`` name that is not in the hub's local cache ever use the network.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import ConfigError, ModelError, ModelNotFoundError
from shared.model.catalogue import CATALOGUE, CatalogueModel, catalogue_model, near_match
from shared.model.download import PullProgress, PullStage, fetch
from shared.model.hub_store import hub_folder
from shared.model.source import GgufFile, HfFolder, ModelSource, RandomModel, SyntheticModel

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "ModelEntry",
    "ModelState",
    "PullProgress",
    "PullStage",
    "list_models",
    "orca_home",
    "pull",
    "remove",
    "resolve",
]

SPELLINGS = (
    "a name of the catalogue (`orca models list`), a folder in Hugging Face layout, a .gguf file, hf:owner/name, "
    "random:<shape>[:<seed>] or synthetic:[key=value,...]"
)


class ModelState(Enum):
    """Whether a catalogue model is on this machine."""

    DOWNLOADED = "downloaded"
    NOT_DOWNLOADED = "not downloaded"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One line of `orca models list`."""

    name: str
    state: ModelState
    size_bytes: int
    path: Path | None
    """The file, when it is downloaded."""
    description: str
    licence: str


def orca_home(home: Path | None = None) -> Path:
    """The folder that ORCA keeps its files in: ``home``, else ``$ORCA_HOME``, else ``~/.cache/orca``."""
    if home is not None:
        return home
    try:
        return Path(os.environ.get("ORCA_HOME") or "~/.cache/orca").expanduser().absolute()
    except RuntimeError as error:  # no HOME and no entry in the user database, as in some containers
        raise ConfigError(f"{error}; set ORCA_HOME to the folder that models shall be kept in") from error


def resolve(name: str, *, home: Path | None = None) -> ModelSource:
    """Where the model is that the user calls ``name``.

    Raises:
        ModelNotFoundError: nothing has that name, or it is a catalogue name that was not pulled yet.
        ModelError: something is there, but it is not a model that can be served.
        ConfigError: a ``random:`` or ``synthetic:`` description that makes no sense.
    """
    kind, separator, rest = name.partition(":")
    if separator and kind == "random":
        return _random_model(rest)
    if separator and kind == "synthetic":
        return _synthetic_model(rest)
    if separator and kind == "hf":
        return HfFolder(hub_folder(rest))
    for model in CATALOGUE:
        if model.name == name:
            return GgufFile(_downloaded(model, home))
    path = _existing_path(name)
    if path is not None:
        return _local_model(path)
    if "/" in name or name.endswith(".gguf"):
        raise ModelNotFoundError(f"no file or folder {name!r} here; a model is {SPELLINGS}")
    names = [model.name for model in CATALOGUE]
    raise ModelNotFoundError(
        f"no model is called {name!r}{near_match(name, names)}; the catalogue has: {', '.join(names)}. "
        f"A model is {SPELLINGS}"
    )


def pull(name: str, *, progress: Callable[[PullProgress], None], home: Path | None = None) -> Path:
    """Download the catalogue's model ``name`` unless it is there, check its hash, and return its file's path.

    Raises:
        ModelNotFoundError: the catalogue has no such model.
        ModelError: it could not be fetched; the message says what to do.
    """
    model = catalogue_model(name)
    path = _path(model, home)
    fetch(model, path, progress)
    return path


def remove(name: str, *, home: Path | None = None) -> bool:
    """Delete the downloaded file of a catalogue model; False when there was none."""
    path = _path(catalogue_model(name), home)
    there = path.exists()
    shutil.rmtree(path.parent, ignore_errors=True)
    return there


def list_models(*, home: Path | None = None) -> list[ModelEntry]:
    """The catalogue, with what of it is downloaded."""
    entries = []
    for model in CATALOGUE:
        path = _path(model, home)
        there = _has_right_size(path, model)
        entries.append(
            ModelEntry(
                name=model.name,
                state=ModelState.DOWNLOADED if there else ModelState.NOT_DOWNLOADED,
                size_bytes=model.size_bytes,
                path=path if there else None,
                description=model.description,
                licence=model.licence,
            )
        )
    return entries


def _path(model: CatalogueModel, home: Path | None) -> Path:
    return orca_home(home) / "models" / model.name / model.file_name


def _has_right_size(path: Path, model: CatalogueModel) -> bool:
    # The hash was checked before the file got its name; the size tells truncation by a full disk or a bad copy.
    return path.is_file() and path.stat().st_size == model.size_bytes


def _downloaded(model: CatalogueModel, home: Path | None) -> Path:
    path = _path(model, home)
    if not _has_right_size(path, model):
        raise ModelNotFoundError(
            f"the model {model.name} is not downloaded yet ({path} is missing or incomplete); "
            f"run `orca models pull {model.name}` ({model.size_bytes / 1e6:.0f} MB)"
        )
    return path


def _existing_path(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path.absolute() if name and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # a name that no path can have
        return None


def _local_model(path: Path) -> ModelSource:
    if path.is_file():
        return GgufFile(_checked_gguf(path))
    if (path / "config.json").is_file():
        if not any(path.glob("*.safetensors")) and any(path.glob("*.bin")):
            raise ModelError(
                f"{path} has its weights in pickle files (*.bin) only, which are never loaded; "
                "convert them to safetensors"
            )
        return HfFolder(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return GgufFile(_checked_gguf(files[0]))
    if files:
        raise ModelError(
            f"{path} holds {len(files)} GGUF files; give one: {', '.join(file.name for file in files[:8])}"
        )
    raise ModelError(f"{path} is not a model: it has neither a config.json nor a .gguf file")


def _checked_gguf(path: Path) -> Path:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file; a model is {SPELLINGS}")
    return path


def _random_model(text: str) -> RandomModel:
    match = re.fullmatch(r"([a-z0-9][a-z0-9._-]*)(?::(\d{1,18}))?", text)
    if match is None:
        raise ConfigError(
            f"cannot read the model 'random:{text}'; write random:<shape>[:<seed>], for example random:tiny:7"
        )
    return RandomModel(match[1], int(match[2] or 0))


def _synthetic_model(text: str) -> SyntheticModel:
    standard = SyntheticModel()
    defaults: dict[str, float] = dataclasses.asdict(standard)
    values: dict[str, float] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in defaults:
            raise ConfigError(
                f"a synthetic model has no {key!r}{near_match(key, list(defaults))}; it has: {', '.join(defaults)}"
            )
        if key in values:
            raise ConfigError(f"synthetic model: {key} is given twice")
        values[key] = _number(key, value, like=defaults[key])
    model = dataclasses.replace(standard, **values)  # type: ignore[arg-type]  # typed like each field's default
    if model.vocab_size < standard.vocab_size:
        raise ConfigError(
            f"synthetic model: vocab_size is at least {standard.vocab_size} (all bytes and special tokens)"
        )
    return model


def _number(key: str, text: str, *, like: float) -> float:
    whole = isinstance(like, int)
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        number = -1
    smallest = 1 if whole else 0
    if not smallest <= number < 1e9:  # false for nan, too
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"synthetic model: {key}={text} cannot be; give {kind} from {smallest} up to 1e9")
    return number
