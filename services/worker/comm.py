"""The data plane of one rank in one epoch: activations between stages, partial sums within one.

Nothing here carries control data: a receiver knows every shape from its control message, and posts a receive only for
a step that it knows of, since an idle gloo receive runs into the group's time limit and breaks the link. On GPUs
``receive`` and ``send`` order work on the device and return at once; the device waits, not the thread.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from services.worker.tensor_parallel import DistributedTensorParallel, SingleRank
from shared.errors import EngineLostError

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

    from services.worker.rendezvous import ProcessGroups
    from services.worker.tensor_parallel import TensorParallel

__all__ = ["Communicator", "StageRanks"]


class StageRanks:
    """The tensor-parallel ranks of a stage, as its layers see them.

    Layers are loaded before the epoch's group exists and outlive it, so the group is put in for each epoch.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._ranks: TensorParallel | None = SingleRank() if size == 1 else None

    def attach(self, group: dist.ProcessGroup | None) -> None:
        """Use the group of this epoch; None on leaving it."""
        if self.size > 1:
            self._ranks = None if group is None else DistributedTensorParallel(group)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the ranks, in place, and return it."""
        return self._joined().all_reduce(tensor)

    def gather_last_dim(self, tensor: Tensor) -> Tensor:
        """Return the ranks' tensors, all of one shape [..., n], side by side: [..., size * n], on every rank."""
        return self._joined().gather_last_dim(tensor)

    def _joined(self) -> TensorParallel:
        if self._ranks is None:
            raise EngineLostError("the ranks of this stage have left the epoch")
        return self._ranks


class Communicator:
    """Receives from the stage before and sends to the one after; used by the compute thread alone."""

    def __init__(
        self, groups: ProcessGroups, *, hidden_size: int, dtype: torch.dtype, device: torch.device, max_sends: int
    ) -> None:
        self._groups = groups
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._max_sends = max_sends
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()

    def receive(self, num_tokens: int) -> Tensor | None:
        """Return the activations of the stage before, [num_tokens, hidden_size]; None on the first stage."""
        group = self._groups.previous
        if group is None:
            return None
        hidden = torch.empty((num_tokens, self._hidden_size), dtype=self._dtype, device=self._device)
        _finish(group.recv([hidden], 0, 0), "no activations from the stage before")
        return hidden

    def send(self, hidden: Tensor) -> None:
        """Send [num_tokens, hidden_size] to the stage after, if there is one, without waiting for it.

        Of the sends under way at most ``max_sends`` are kept; with no more steps in flight than that, none ever waits.
        """
        group = self._groups.following
        if group is None:
            return
        if len(self._sends) == self._max_sends:
            work, _ = self._sends.popleft()
            _finish(work, "the stage after does not take its activations")
        hidden = hidden.contiguous()
        self._sends.append((group.send([hidden], 1, 0), hidden))

    def abort(self) -> None:
        """End what is under way where that can be done; from any thread."""
        self._groups.abort()

    def close(self) -> None:
        """Drop the groups and what is still being sent: peers notice at once."""
        self._sends.clear()
        self._groups.drop()


def _finish(work: dist.Work, what: str) -> None:
    try:
        work.wait()
    except RuntimeError as failure:
        # Not chained: a traceback would hold the work, and with it the link, open.
        raise EngineLostError(f"{what}: {str(failure).partition('. ')[0]}") from None
