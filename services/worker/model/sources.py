"""From the kind of model to the reader of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.worker.model.gguf_weights import GgufWeights
from services.worker.model.hf_weights import HfWeights
from services.worker.model.random_weights import RandomWeights
from shared.errors import ModelError
from shared.model.source import GgufFile, HfFolder, ModelSource, RandomModel

if TYPE_CHECKING:
    import torch

    from services.worker.model.parameters import WeightSource
    from shared.model.config import ModelConfig

__all__ = ["open_weights"]


def open_weights(source: ModelSource, config: ModelConfig, device: torch.device) -> WeightSource:
    """Open the weights of ``source``; ModelError when its files are missing or damaged."""
    match source:
        case HfFolder(path):
            return HfWeights(path, config.family)
        case GgufFile(path):
            return GgufWeights(path, config)
        case RandomModel(_, seed):
            return RandomWeights(seed, device)
        case _:
            raise ModelError("A synthetic model has no weights: run it with the synthetic executor.")
