"""Models, cut into pipeline stages and tensor-parallel ranks: how they are loaded and run."""

from services.worker.model.stage import StageModel, load_stage

__all__ = ["StageModel", "load_stage"]
