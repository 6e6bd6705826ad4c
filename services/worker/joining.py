"""The blocking work of joining an epoch, for a thread of its own: weights, process groups, K/V, warm-up.

Knows the order of these and how to give up: a thread cannot be cancelled, so ``abandon`` makes it fail at the next part
of the weights, or at the gate where it waits for the others. Only while it connects to peers, and in the warm-up, may
it hold on, for ``collective_timeout_s`` at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from services.worker.batch import ForwardBatch
from services.worker.comm import Communicator
from services.worker.kv_cache import KvCache, num_blocks_within
from services.worker.loading import LoadedStage, load, place_of
from services.worker.rendezvous import Gate, ProcessGroups, make_groups
from shared.errors import ConfigError, EngineLostError
from shared.log import get_logger
from shared.messages import Joined, JoinRequest, Loading
from shared.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Assembly", "Joining"]

_MAX_SLOTS = 2**31 - 1
"""Slots must fit the block tables' int32 arithmetic in kernels."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """All that a rank computes with in one epoch."""

    loaded: LoadedStage
    kv: KvCache
    communicator: Communicator
    joined: Joined


class Joining:
    """One attempt to join. ``kept`` are the weights of an earlier epoch, taken if they are of the same place."""

    def __init__(
        self,
        request: JoinRequest,
        *,
        device: torch.device,
        host: str,
        kept: LoadedStage | None,
        report: Callable[[Loading], None],
    ) -> None:
        self._request = request
        self._device = device
        self._host = host
        self._report = report
        self._is_abandoned = False
        self._has_peers = Topology(request.num_stages, request.tp_size).world_size > 1
        self._gate = Gate(request)
        self.loaded = kept
        """Weights in memory, which outlive a failed attempt."""

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self._request.epoch

    def run(self) -> Assembly:
        """Join; blocks. Raises the typed error of whatever is in the way."""
        request = self._request
        if request.workers_append_tokens and request.num_stages > 1:
            raise ConfigError(
                "only an engine of one stage can run ahead: elsewhere the stage that samples does not embed"
            )
        loaded = self._load()
        max_model_len = request.max_model_len or loaded.max_model_len
        if max_model_len > loaded.max_model_len:
            raise ConfigError(
                f"--max-model-len {max_model_len} is more than the {loaded.max_model_len} tokens that "
                f"{request.model} is made for"
            )
        block_bytes = loaded.block_bytes(request.block_size)
        num_blocks = min(num_blocks_within(request.kv_memory_bytes, block_bytes), _MAX_SLOTS // request.block_size)
        groups = self._meet()
        try:
            return self._assemble(loaded, groups, num_blocks, max_model_len)
        except BaseException:
            loaded.ranks.attach(None)
            groups.drop()
            raise

    def abandon(self) -> None:
        """Let ``run`` fail as soon as it can; from any thread, blocks for a round trip to the store."""
        self._is_abandoned = True
        if self._has_peers:
            self._gate.abandon()

    def _load(self) -> LoadedStage:
        place = place_of(self._request, self._device)
        if self.loaded is not None and self.loaded.place == place:
            return self.loaded
        self._begin("weights")
        self.loaded = None  # room for the new ones

        def progress(done: int, total: int) -> None:
            self._begin("weights", done, total)

        self.loaded = load(place, progress)
        return self.loaded

    def _meet(self) -> ProcessGroups:
        if not self._has_peers:
            return ProcessGroups()
        self._begin("process_group")
        return make_groups(self._request, self._gate.wait(), self._device, self._host)

    def _assemble(self, loaded: LoadedStage, groups: ProcessGroups, num_blocks: int, max_model_len: int) -> Assembly:
        request = self._request
        self._begin("kv_cache")
        kv = loaded.allocate_kv(num_blocks, request.block_size)
        loaded.ranks.attach(groups.tensor_parallel)
        communicator = Communicator(
            groups,
            hidden_size=loaded.hidden_size,
            dtype=loaded.dtype,
            device=self._device,
            max_sends=request.num_stages,
        )
        self._begin("warm_up")
        try:
            _warm_up(loaded, kv, communicator, is_last=request.stage == request.num_stages - 1)
        except torch.OutOfMemoryError as failure:
            raise ConfigError(
                f"K/V of {request.kv_memory_bytes} bytes leave no memory of {self._device} to compute with: "
                f"lower --kv-memory"
            ) from failure
        except RuntimeError as failure:
            raise EngineLostError(
                f"stage {request.stage}, rank {request.tp_rank} failed its first iteration: {failure}"
            ) from failure
        return Assembly(
            loaded=loaded,
            kv=kv,
            communicator=communicator,
            joined=Joined(
                num_blocks=num_blocks,
                max_model_len=max_model_len,
                vocab_size=loaded.vocab_size,
                dtype=loaded.dtype_name,
                weights_bytes=loaded.weights_bytes,
                kv_bytes_per_block=loaded.block_bytes(request.block_size),
            ),
        )

    def _begin(self, phase: str, done: int = 0, total: int = 0) -> None:
        if self._is_abandoned:
            raise EngineLostError(f"joining epoch {self._request.epoch} was given up")
        request = self._request
        share = {"done": done, "total": total} if total else {}
        get_logger().info("loading", phase=phase, **share, stage=request.stage, tp_rank=request.tp_rank)
        self._report(Loading(phase, done, total))


def _warm_up(loaded: LoadedStage, kv: KvCache, communicator: Communicator, *, is_last: bool) -> None:
    """Run an iteration of one token through all stages: what is lazy is made now, and a broken link shows itself."""
    batch = ForwardBatch.from_arrays(
        token_ids=[0],
        positions=[0],
        slot_mapping=[0],
        query_start=[0, 1],
        context_lens=[1],
        block_tables=[[0]],
        sample_rows=[0],
        device=loaded.place.device,
    )
    hidden = loaded.stage.forward(batch, communicator.receive(1), kv)
    communicator.send(hidden)
    if is_last:
        loaded.stage.logits(hidden[batch.sample_rows])
        if loaded.greedy is not None:
            loaded.greedy(hidden, batch.sample_rows)
