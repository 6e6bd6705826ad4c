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


def attend(q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, kv: LayerKv) -> Tensor:
    """Store this iteration's K and V, then attend; q [T, H, D], k and v [T, KH, D] to [T, H * D]."""
    kernels.write_kv(k, v, kv.k, kv.v, batch.slot_mapping)
    out = kernels.paged_attention(
        q, kv.k, kv.v, batch.query_start, batch.context_lens, batch.block_tables, q.shape[-1] ** -0.5
    )
    return out.flatten(1)
