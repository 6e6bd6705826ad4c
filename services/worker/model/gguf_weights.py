"""Weights in a GGUF file, dequantized as they are read.

Only the quantization blocks that hold the wanted rows and columns are touched. llama.cpp keeps the query and key rows
of its ``llama`` architecture in pairs (i, i + D/2 side by side); here they are put back into Hugging Face's order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch

from services.worker.model.names import gguf_name
from shared.errors import ModelError
from shared.model.gguf_metadata import read_gguf_header

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from shared.model.config import ModelConfig
    from shared.model.gguf_metadata import GgufTensor

    _Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    _Floats = np.ndarray[Any, np.dtype[np.float32]]

__all__ = ["GgufWeights"]

_PAIRED = (".self_attn.q_proj.", ".self_attn.k_proj.")
_CHUNK_BYTES = 1 << 17
"""Bytes dequantized at a time: what comes out of them stays in a CPU's cache."""


class GgufWeights:
    """A :class:`~services.worker.model.parameters.WeightSource` over one GGUF file."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        """Map the file; ModelError when it is damaged."""
        self._path = path
        self._config = config
        self._tensors = read_gguf_header(path).tensors
        self._data = np.memmap(path, dtype=np.uint8, mode="r")

    def has(self, name: str) -> bool:
        """Return whether the file has that tensor."""
        return gguf_name(self._config.family, name).name in self._tensors

    def read(self, name: str, shape: tuple[int, ...], rows: range, columns: range | None = None) -> Tensor:
        """Return a part of a parameter, float32; ModelError when it is missing or of another shape."""
        stored = gguf_name(self._config.family, name)
        tensor = self._tensors.get(stored.name)
        if tensor is None:
            raise ModelError(f"{self._path} has no tensor {stored.name!r}: the model is incomplete, fetch it again.")
        whole = (shape[0] * stored.num_parts, *shape[1:])
        if tensor.shape != whole:
            raise ModelError(
                f"{self._path}: tensor {stored.name!r} has shape {list(tensor.shape)} but the file's fields make it "
                f"{list(whole)}: fetch the model again, or convert it anew."
            )
        first = stored.part * shape[0]
        if columns is None:
            values = self._dequantize(tensor, range(1), range(first + rows.start, first + rows.stop))[0]
        else:
            values = self._dequantize(tensor, range(first + rows.start, first + rows.stop), columns)
        part = torch.from_numpy(values)
        return self._unpaired(part) if self._config.architecture == "llama" and _is_paired(name) else part

    def _dequantize(self, tensor: GgufTensor, rows: range, columns: range) -> _Floats:
        """Return a part of ``tensor``, seen as a matrix, as an array of its own."""
        size = tensor.block_size
        blocks = slice(columns.start // size, -(-columns.stop // size))
        start = tensor.offset + rows.start * tensor.row_bytes
        data = self._data[start : start + len(rows) * tensor.row_bytes].reshape(len(rows), tensor.row_bytes)
        data = data[:, blocks.start * tensor.block_bytes : blocks.stop * tensor.block_bytes]
        first = columns.start - blocks.start * size
        packed = np.ascontiguousarray(data).reshape(-1, tensor.block_bytes)
        values = np.empty((packed.shape[0], size), dtype=np.float32)
        chunk = max(1, _CHUNK_BYTES // tensor.block_bytes)
        for at in range(0, packed.shape[0], chunk):
            # One long row at a time: the package loops over short ones in Python.
            piece = packed[at : at + chunk].reshape(1, -1)
            values[at : at + chunk] = self._spread(piece, tensor).reshape(-1, size)
        return values.reshape(len(rows), -1)[:, first : first + len(columns)]

    def _spread(self, packed: _Bytes, tensor: GgufTensor) -> _Floats:
        kind = gguf.GGMLQuantizationType(tensor.type_id)
        try:
            values: _Floats = gguf.quants.dequantize(packed, kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self._path}: tensor {tensor.name!r} is of type {kind.name}, which is not supported: "
                "get the model in another quantization."
            ) from error
        return values

    def _unpaired(self, part: Tensor) -> Tensor:
        """Return rows of whole heads in the order of Hugging Face: first halves, then second halves."""
        half = self._config.head_dim // 2
        return part.view(-1, half, 2, *part.shape[1:]).transpose(1, 2).reshape(part.shape)


def _is_paired(name: str) -> bool:
    return any(layer in name for layer in _PAIRED)
