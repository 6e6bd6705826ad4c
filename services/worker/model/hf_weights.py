"""Weights in safetensors files of a Hugging Face folder: one file, or shards with an index.

Reads slices only, through safetensors' memory map; never a pickled file.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from services.worker.model.names import hf_name
from shared.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from shared.model.config import Family

__all__ = ["HfWeights"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PREFIXES: dict[Family, str] = {"llama": "model.", "gpt2": "transformer."}
_MAX_INDEX_BYTES = 64 << 20
_FLOATS = {"F64", "F32", "F16", "BF16"}


class HfWeights:
    """A :class:`~services.worker.model.parameters.WeightSource` over safetensors files."""

    def __init__(self, folder: Path, family: Family) -> None:
        """Find out which file holds which tensor; ModelError when there are no weights or the index is damaged."""
        self._folder = folder
        self._family = family
        self._prefix = _PREFIXES[family]
        self._handles: dict[str, Any] = {}
        self._files = self._index()

    def has(self, name: str) -> bool:
        """Return whether a file has that tensor."""
        return self._find(hf_name(self._family, name).name) is not None

    def read(self, name: str, shape: tuple[int, ...], rows: range, columns: range | None = None) -> Tensor:
        """Return a part of a parameter, in the type of the file; ModelError when it is missing or of another shape."""
        stored = hf_name(self._family, name)
        key = self._find(stored.name)
        if key is None:
            raise ModelError(f"{self._folder} has no tensor {stored.name!r}: the model is incomplete, fetch it again.")
        whole = (shape[0] * stored.num_parts, *shape[1:])
        if stored.transposed:
            whole = (whole[1], whole[0])
        first = stored.part * shape[0]
        picked = slice(first + rows.start, first + rows.stop)
        try:
            tensor = self._open(self._files[key]).get_slice(key)
            if tuple(tensor.get_shape()) != whole:
                raise ModelError(
                    f"{self._folder}: tensor {key!r} has shape {tensor.get_shape()} but config.json makes it "
                    f"{list(whole)}: config and weights are of different models, fetch the model again."
                )
            if tensor.get_dtype() not in _FLOATS:
                raise ModelError(
                    f"{self._folder}: tensor {key!r} is of type {tensor.get_dtype()}, which is not supported: "
                    "use weights in float32, float16 or bfloat16."
                )
            if columns is None:
                part: Tensor = tensor[picked]
                return part
            across = slice(columns.start, columns.stop)
            part = tensor[across, picked].T if stored.transposed else tensor[picked, across]
        except SafetensorError as error:
            raise _damaged(self._folder / self._files[key], error) from error
        return part

    def _find(self, name: str) -> str | None:
        for key in (name, self._prefix + name):
            if key in self._files:
                return key
        return None

    def _open(self, file_name: str) -> Any:
        handle = self._handles.get(file_name)
        if handle is None:
            path = self._folder / file_name
            try:
                handle = self._handles[file_name] = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise ModelError(f"{path} is missing: the model is incomplete, fetch it again.") from error
            except (SafetensorError, OSError) as error:
                raise _damaged(path, error) from error
        return handle

    def _index(self) -> dict[str, str]:
        """Return the file of each tensor."""
        if (self._folder / _SINGLE).exists():
            return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)
        path = self._folder / _INDEX
        if not path.exists():
            raise ModelError(
                f"{self._folder} has neither {_SINGLE} nor {_INDEX}. Weights in pickled .bin files are not read, for "
                "safety: get the model in safetensors format."
            )
        try:
            if path.stat().st_size > _MAX_INDEX_BYTES:
                raise ModelError(f"{path} is too large for an index: fetch the model again.")
            files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            names = dict.fromkeys(files.values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _damaged(path, error) from error
        for name in names:
            if not isinstance(name, str) or "/" in name or "\\" in name or not name.endswith(".safetensors"):
                raise ModelError(f"{path} names the file {name!r}, which is no safetensors file beside it.")
            if not (self._folder / name).exists():
                raise ModelError(f"{self._folder / name} is missing: the model is incomplete, fetch it again.")
        return {key: str(value) for key, value in files.items()}


def _damaged(path: Path, error: Exception) -> ModelError:
    return ModelError(f"{path} is damaged or incomplete ({error}): fetch the model again.")
