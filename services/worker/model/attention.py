"""Where a layer's tokens meet those before them: the one step that is done per request.

(Selective batching, ORCA §3.2: everything else sees all requests' tokens as one matrix.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import kernels

if TYPE_CHECKING:
    from torch import Tensor

    from services.worker.batch import ForwardBatch
    from services.worker.kv_cache import LayerKv

__all__ = ["attend"]


def attend(q: Tensor, batch: ForwardBatch, kv: LayerKv) -> Tensor:
    """Attend to the K and V that are stored, this iteration's included; q [T, H, D] to [T, H * D]."""
    out = kernels.paged_attention(
        q, kv.k, kv.v, batch.query_start, batch.context_lens, batch.block_tables, q.shape[-1] ** -0.5
    )
    return out.flatten(1)
