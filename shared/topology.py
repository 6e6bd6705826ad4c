"""Who is where: world = stages × tensor-parallel ranks. Pure arithmetic, no I/O."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from shared.errors import ConfigError

__all__ = ["Topology", "split_layers"]


@dataclass(frozen=True, slots=True)
class Topology:
    """A mesh of ``num_stages`` pipeline stages with ``tp_size`` tensor-parallel ranks each (ORCA §4.1, Fig. 6)."""

    num_stages: int = 1
    tp_size: int = 1

    def __post_init__(self) -> None:
        """Check the shape."""
        for name, value in (("stages", self.num_stages), ("tp", self.tp_size)):
            if not 1 <= value <= 1024:
                raise ConfigError(f"--{name} must be between 1 and 1024, not {value}")

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.num_stages * self.tp_size

    def world_rank(self, stage: int, tp_rank: int) -> int:
        """Rank in the process group of all workers; the ranks of a stage are neighbours."""
        self.check_rank(stage, tp_rank)
        return stage * self.tp_size + tp_rank

    def check_rank(self, stage: int, tp_rank: int) -> None:
        """Raise ``ConfigError`` for a rank that this mesh does not have."""
        if not 0 <= stage < self.num_stages:
            raise ConfigError(f"stage {stage} does not exist: this mesh has stages 0 to {self.num_stages - 1}")
        if not 0 <= tp_rank < self.tp_size:
            raise ConfigError(f"tensor-parallel rank {tp_rank} does not exist: each stage has 0 to {self.tp_size - 1}")

    def ranks(self) -> list[tuple[int, int]]:
        """All ``(stage, tp_rank)`` in order of world rank."""
        return [(stage, tp_rank) for stage in range(self.num_stages) for tp_rank in range(self.tp_size)]


def split_layers(num_layers: int, num_stages: int) -> list[range]:
    """Layers of each stage: sizes differ by one at most, and the first stages have the larger share.

    The last stage has the output head on top of its layers, so it never gets one of the extra layers.
    """
    if num_stages > num_layers:
        raise ConfigError(
            f"{num_stages} stages for {num_layers} layers: every stage needs one; --stages {num_layers} is the most"
        )
    share, extra = divmod(num_layers, num_stages)
    bounds = [0]
    for stage in range(num_stages):
        bounds.append(bounds[-1] + share + (stage < extra))
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]
