"""Reading the part of each parameter that one rank needs, on its device and in its type.

Knows how parts are cut and put together into the layers' tensors; the three kinds of source know their files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from services.worker.model.linear import ColumnParallelLinear, RowParallelLinear
from shared.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from services.worker.tensor_parallel import TensorParallel
    from shared.model.config import ModelConfig

__all__ = ["Parameters", "Rows", "WeightSource"]


class WeightSource(Protocol):
    """Weights by name (see ``names``), read in rectangular parts."""

    def has(self, name: str) -> bool:
        """Return whether the source has a tensor of that name."""

    def read(self, name: str, shape: tuple[int, ...], rows: range, columns: range | None = None) -> Tensor:
        """Return ``rows`` (and ``columns``, of a matrix) of the parameter whose whole shape is ``shape``.

        Any float type, any device. Raises ModelError when it is missing, damaged or of another shape.
        """


class Rows(NamedTuple):
    """Some output rows of one matrix of a fused layer."""

    name: str
    """Of the layer, without ``.weight``."""
    total: int
    """Rows of the whole matrix."""
    part: range


@dataclass(frozen=True, slots=True)
class Parameters:
    """One rank's view of a model's weights."""

    config: ModelConfig
    source: WeightSource
    tp: TensorParallel
    device: torch.device
    dtype: torch.dtype

    def vector(self, name: str, size: int) -> Tensor:
        """Return a whole vector, [size]."""
        return self._fill((size,), [self.source.read(name, (size,), range(size))])

    def matrix(self, name: str, shape: tuple[int, int], rows: range, *, padded_rows: int | None = None) -> Tensor:
        """Return some rows of a matrix, followed by rows of zeros up to ``padded_rows``."""
        part = self.source.read(name, shape, rows, range(shape[1]))
        return self._fill((padded_rows or len(rows), shape[1]), [part])

    def column_parallel(self, parts: Sequence[Rows], in_size: int, *, bias: bool) -> ColumnParallelLinear:
        """Return the layers of ``parts`` as one, whose outputs stand side by side."""
        out_size = sum(len(rows.part) for rows in parts)
        weights = (
            self.source.read(f"{rows.name}.weight", (rows.total, in_size), rows.part, range(in_size)) for rows in parts
        )
        biases = (self.source.read(f"{rows.name}.bias", (rows.total,), rows.part) for rows in parts)
        return ColumnParallelLinear(
            weight=self._fill((out_size, in_size), weights), bias=self._fill((out_size,), biases) if bias else None
        )

    def row_parallel(self, name: str, shape: tuple[int, int], columns: range, *, bias: bool) -> RowParallelLinear:
        """Return a layer of which this rank holds some input ``columns``; shape [out, in] of the whole."""
        weight = self.source.read(f"{name}.weight", shape, range(shape[0]), columns)
        return RowParallelLinear(
            weight=self._fill((shape[0], len(columns)), [weight]),
            bias=self.vector(f"{name}.bias", shape[0]) if bias else None,
            tp=self.tp,
        )

    def _fill(self, shape: tuple[int, ...], parts: Iterable[Tensor]) -> Tensor:
        """Return a tensor of its own, never a view of a file, that holds ``parts`` from the top and zeros below."""
        try:
            out = torch.zeros(shape, device=self.device, dtype=self.dtype)
        except RuntimeError as error:
            raise ModelError(
                f"The weights of {self.config.architecture} do not fit the memory of {self.device}: use more stages or "
                "tensor-parallel ranks, a smaller type, or a smaller model."
            ) from error
        at = 0
        for part in parts:
            out[at : at + part.shape[0]].copy_(part)
            at += part.shape[0]
        return out
