"""The header of a GGUF file: its key-value fields and where each tensor lies.

Knows the file format (github.com/ggml-org/ggml/blob/master/docs/gguf.md), versions 2 and 3, little-endian; not what
the keys mean. Every count and length is checked against the file's size, so that a damaged or hostile file ends in
ModelError. (The ``gguf`` package reads the same, but takes two seconds over a vocabulary of 50,000 tokens.)
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from shared.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["GgufHeader", "GgufTensor", "read_gguf_header"]

_T = TypeVar("_T")

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_FIELDS = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_DIMENSIONS = 4
_MAX_ARRAY = 1 << 22
"""Values in one field; vocabularies are the longest."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies, and how its rows are packed."""

    name: str
    shape: tuple[int, ...]
    """As torch counts: the last axis is contiguous (GGUF counts the other way round)."""
    type_id: int
    """The ``GGMLQuantizationType``."""
    block_size: int
    """Elements that are packed together along the last axis; 1 for plain types."""
    block_bytes: int
    offset: int
    """From the start of the file, bytes."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one run along the last axis."""
        return self.shape[-1] // self.block_size * self.block_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What stands before the data in a GGUF file."""

    path: Path
    fields: dict[str, Any]
    """Numbers, bools, strings, and lists of them."""
    tensors: dict[str, GgufTensor]

    def get(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        """Return the field ``key``; ModelError when it is absent without a default, or not of type ``kind``."""
        value = self.fields.get(key, default)
        if value is None:
            raise ModelError(f"{self.path} has no field {key!r}: fetch the model again, or convert it anew.")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(f"{self.path}: field {key!r} is no {kind.__name__}: fetch the model again.")
        return value


def read_gguf_header(path: Path) -> GgufHeader:
    """Return the header of the file at ``path``; ModelError when it is no complete GGUF file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path).header()
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist: check the path, or fetch the model again.") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        # ValueError: mmap's word for an empty file.
        raise ModelError(f"{path} is damaged or incomplete ({error}): fetch the model again.") from error


class _Reader:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0

    def header(self) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            raise ModelError(f"{self._path} is not a GGUF file: check the path.")
        self._at = 4
        version = self._scalar("I")
        if version not in {2, 3}:
            raise ModelError(
                f"{self._path}: GGUF version {version} is not supported, only 2 and 3: convert the model anew."
            )
        num_tensors, num_fields = self._scalar("Q"), self._scalar("Q")
        if num_tensors > _MAX_TENSORS or num_fields > _MAX_FIELDS:
            raise self._damaged(f"it claims {num_tensors} tensors and {num_fields} fields")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string()
            fields[key] = self._value(self._scalar("I"))
        return GgufHeader(self._path, fields, self._tensors(num_tensors, fields.get("general.alignment", 32)))

    def _tensors(self, count: int, alignment: object) -> dict[str, GgufTensor]:
        from gguf.constants import GGML_QUANT_SIZES

        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 16:
            raise self._damaged(f"its alignment is {alignment!r}")
        packing = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
        infos = [(self._string(), self._dimensions(), self._scalar("I"), self._scalar("Q")) for _ in range(count)]
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, type_id, offset in infos:
            if type_id not in packing:
                raise ModelError(
                    f"{self._path}: tensor {name!r} is of the unknown type {type_id}: update the gguf package."
                )
            block_size, block_bytes = packing[type_id]
            tensor = GgufTensor(name, shape, type_id, block_size, block_bytes, start + offset)
            if name in tensors or shape[-1] % block_size:
                raise self._damaged(f"tensor {name!r} is there twice or has broken rows")
            if tensor.offset + tensor.num_bytes > len(self._data):
                raise self._damaged(f"tensor {name!r} lies beyond its end")
            tensors[name] = tensor
        return tensors

    def _dimensions(self) -> tuple[int, ...]:
        count = self._scalar("I")
        if not 1 <= count <= _MAX_DIMENSIONS:
            raise self._damaged(f"a tensor has {count} dimensions")
        return tuple(reversed(self._scalars("Q", count)))

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._damaged(f"a field is of the unknown type {kind}")
        item, count = self._scalar("I"), self._scalar("Q")
        if count <= _MAX_ARRAY and item in _SCALARS:
            return list(self._scalars(_SCALARS[item], count))
        if count <= _MAX_ARRAY and item == _STRING:
            return [self._string() for _ in range(count)]
        raise self._damaged(f"an array holds {count} values of type {item}")

    def _scalar(self, code: str) -> Any:
        return self._scalars(code, 1)[0]

    def _scalars(self, code: str, count: int) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{code}")
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return values

    def _string(self) -> str:
        length = self._scalar("Q")
        end = self._at + length
        if end > len(self._data):
            raise self._damaged("a string runs beyond its end")
        text = self._data[self._at : end].decode("utf-8")
        self._at = end
        return text

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self._path} is damaged or incomplete ({what}): fetch the model again.")
