"""The compute thread: runs the control messages of an epoch strictly in order (ORCA §4.1).

One step: apply the diff, flatten the batch, take the activations of the stage before, run the layers, pass the result
on without waiting or, on the last stage, sample. Knows nothing of gRPC, peers' addresses or who reads the results.
Plans come through a queue; what it has done is told through ``on_step``, called in this thread.

On a CPU all times are of the work itself. On a GPU the last stage's end is when its tokens are on the host, while other
stages only issue work, so that the device is never kept waiting.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from services.worker.inputs import forward_batch, sampling_columns
from services.worker.sampler import sample
from services.worker.sequences import SequenceTable
from shared.errors import EngineLostError, OrcaError
from shared.log import get_logger
from shared.messages import StepResult, StepTiming

if TYPE_CHECKING:
    from torch import Tensor

    from services.worker.joining import Assembly
    from services.worker.sequences import Batch
    from services.worker.timeline import Timeline
    from shared.clock import Clock
    from shared.messages import JoinRequest, StepPlan

__all__ = ["Executor", "OnStep"]


class OnStep(Protocol):
    """Told of each step that has ended, in the compute thread; the result is None on ranks that sample nothing."""

    def __call__(self, result: StepResult | None, /) -> None:
        """Take note."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    plan: StepPlan
    received_ns: int


class Executor:
    """Computes one epoch's steps on this rank. ``run`` is the thread; the other methods are for the event loop."""

    def __init__(
        self, request: JoinRequest, assembly: Assembly, *, timeline: Timeline, clock: Clock, on_step: OnStep
    ) -> None:
        self._request = request
        self._assembly: Assembly | None = assembly
        self._communicator = assembly.communicator
        self._device = assembly.loaded.place.device
        self._is_last = request.stage == request.num_stages - 1
        self._timeline = timeline
        self._clock = clock
        self._on_step = on_step
        self._arrivals: queue.SimpleQueue[_Arrival | None] = queue.SimpleQueue()
        self._is_stopped = False
        self._untold: list[StepResult | None] = []
        self._table = SequenceTable(
            max_model_len=assembly.joined.max_model_len,
            vocab_size=assembly.joined.vocab_size,
            num_blocks=assembly.joined.num_blocks,
            block_size=request.block_size,
        )

    def submit(self, plan: StepPlan, received_ns: int) -> None:
        """Queue a plan; bounding the queue is the caller's part."""
        self._arrivals.put(_Arrival(plan, received_ns))

    def stop(self) -> None:
        """Let ``run`` return after the step under way. A receive under way ends when its peer leaves, too."""
        self._is_stopped = True
        self._arrivals.put(None)

    def run(self) -> OrcaError | None:
        """Compute until stopped, or until a step fails; return why it failed.

        ``ProtocolError``: a plan does not fit. ``EngineLostError``: a peer or the compute failed. The error is
        returned, not raised, since a traceback would hold on to K/V and links, which are dropped here.
        """
        assembly = self._assembly
        if assembly is None:
            raise RuntimeError("an executor runs once")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        failure = None
        try:
            with torch.inference_mode():
                while failure is None and (arrival := self._arrivals.get()) is not None and not self._is_stopped:
                    failure = self._try_step(assembly, arrival)
                    if self._arrivals.empty():
                        self._tell()
        finally:
            self._tell()
            self._assembly = None
            assembly.loaded.ranks.attach(None)
            self._communicator.close()
        return failure

    def abort(self) -> None:
        """End communication under way where the backend can (NCCL)."""
        self._communicator.abort()

    def _try_step(self, assembly: Assembly, arrival: _Arrival) -> OrcaError | None:
        plan = arrival.plan
        try:
            self._step(assembly, arrival)
        except Exception as error:  # whatever a step fails with ends the epoch, and no more than that
            if self._is_stopped:
                return EngineLostError(f"the epoch ended during step {plan.step_id}")
            log = get_logger().bind(step_id=plan.step_id, epoch=plan.epoch, **_shape(plan))
            if isinstance(error, OrcaError):
                log.warning("step_failed", error=type(error).__name__, message=str(error))
                return type(error)(str(error))
            log.exception("step_failed")
            return EngineLostError(
                f"stage {self._request.stage}, rank {self._request.tp_rank} failed at step {plan.step_id} "
                f"({type(error).__name__}: {str(error).partition(chr(10))[0]}); its log has the details"
            )
        return None

    def _step(self, assembly: Assembly, arrival: _Arrival) -> None:
        plan = arrival.plan
        batch = self._table.apply(plan)
        started_ns = ended_ns = self._clock.now_ns()
        token_ids: list[int] = []
        invalid: list[int] = []
        if batch.rows.size:
            inputs = forward_batch(self._table, batch, self._device)
            self._tell()
            hidden = self._communicator.receive(inputs.num_tokens)
            started_ns = self._clock.now_ns()
            hidden = assembly.loaded.stage.forward(inputs, hidden, assembly.kv)
            ended_ns = self._clock.now_ns()
            self._communicator.send(hidden)
            if self._is_last and len(inputs.sample_rows):
                logits = assembly.loaded.stage.logits(hidden[inputs.sample_rows])
                # All ranks have the same logits to the last bit, hence the same tokens.
                if self._request.tp_rank == 0 or self._request.workers_append_tokens:
                    token_ids, invalid = self._sample(batch, logits)
                if self._request.workers_append_tokens:
                    self._table.append_sampled(batch, token_ids)
                ended_ns = self._clock.now_ns()
        self._timeline.add(
            StepTiming(
                step_id=plan.step_id,
                received_ns=arrival.received_ns,
                started_ns=started_ns,
                ended_ns=ended_ns,
                num_sequences=len(plan.rows),
                num_tokens=int(batch.num_tokens.sum()),
            )
        )
        has_result = self._is_last and self._request.tp_rank == 0
        self._untold.append(
            StepResult(
                epoch=plan.epoch,
                step_id=plan.step_id,
                token_ids=token_ids,
                invalid=invalid,
                compute_ns=ended_ns - started_ns,
            )
            if has_result
            else None
        )

    def _tell(self) -> None:
        """Tell what has been done since the last time.

        Whoever hears it competes for the interpreter. Where the next plan is here already, its inputs are made first,
        and the listener runs while the device, or the layers outside the interpreter, compute.
        """
        for result in self._untold:
            self._on_step(result)
        self._untold.clear()

    def _sample(self, batch: Batch, logits: Tensor) -> tuple[list[int], list[int]]:
        sampled = sample(logits, sampling_columns(self._table, batch))
        valid = sampled.valid.cpu().numpy()
        tokens = np.where(valid, sampled.token_ids.cpu().numpy(), 0)
        return tokens.tolist(), np.flatnonzero(~valid).tolist()


def _shape(plan: StepPlan) -> dict[str, list[int]]:
    """What of a plan goes into a log: all but tokens, which are the users' own."""
    return {
        "rows": list(plan.rows),
        "num_computed_tokens": plan.num_computed_tokens,
        "num_tokens": plan.num_tokens,
        "num_new_blocks": plan.num_new_blocks,
        "new_rows": [sequence.row for sequence in plan.new_sequences],
        "released_rows": list(plan.released_rows),
    }
