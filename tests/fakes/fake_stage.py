"""An executor's assembly around a stage that a test writes: no weights, no K/V, no peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from services.worker.comm import Communicator, StageRanks
from services.worker.joining import Assembly
from services.worker.kv_cache import KvCache
from services.worker.loading import LoadedStage, Place
from services.worker.rendezvous import ProcessGroups
from services.worker.sampling.guidance import Vocabulary
from shared.messages import Joined
from shared.text.byte_tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from services.worker.loading import RunnableStage

__all__ = ["MAX_MODEL_LEN", "NUM_BLOCKS", "VOCAB_SIZE", "assemble"]

VOCAB_SIZE = 16
MAX_MODEL_LEN = 64
NUM_BLOCKS = 64
_CPU = torch.device("cpu")


def assemble(stage: RunnableStage) -> Assembly:
    """Put ``stage``, with activations of one number a token, in the place of a whole model."""
    loaded = LoadedStage(
        place=Place("fake", "float32", _CPU, stage=0, num_stages=1, tp_rank=0, tp_size=1, block_size=16),
        stage=stage,
        ranks=StageRanks(0, 1),
        hidden_size=1,
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        dtype=torch.float32,
        dtype_name="float32",
        weights_bytes=0,
        block_bytes=lambda block_size: block_size,
        vocabulary=Vocabulary(lambda: ByteTokenizer(VOCAB_SIZE), VOCAB_SIZE),
        allocate_kv=lambda num_blocks, block_size: KvCache((), num_blocks, block_size),
    )
    communicator = Communicator(ProcessGroups(), hidden_size=1, dtype=torch.float32, device=_CPU, max_sends=1)
    joined = Joined(NUM_BLOCKS, MAX_MODEL_LEN, VOCAB_SIZE, "float32", 0, 16)
    return Assembly(loaded, KvCache((), NUM_BLOCKS, 16), communicator, joined)
