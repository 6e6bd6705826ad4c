"""The compute thread: runs the control messages of an epoch strictly in order (ORCA §4.1).

One step: fill in tokens that were sampled here last, take the activations of the stage before, run the layers, pass the
result on without waiting or, on the last stage, sample. Knows nothing of gRPC, peers' addresses or who reads the
results. Plans come through a queue, prepared on the thread that they arrive on, so that little is left to be done
between two steps; what has been done is told through ``on_step``, called in this thread.

On a CPU all times are of the work itself. On a GPU the last stage's end is when its tokens are on the host, while other
stages only issue work, so that the device is never kept waiting.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from services.worker.inputs import greedy_columns
from services.worker.outcome import Outcome
from services.worker.preparation import StepPreparer, makes_logits, samples_tokens
from services.worker.sampling.prompt_scores import PromptScores, score_prompt
from services.worker.sampling.sampler import ChosenTokens, choose
from services.worker.sequences import MAX_ROWS
from shared.errors import EngineLostError, OrcaError
from shared.log import get_logger

if TYPE_CHECKING:
    from torch import Tensor

    from services.worker.joining import Assembly
    from services.worker.loading import LoadedStage
    from services.worker.preparation import PreparedStep
    from shared.clock import Clock
    from shared.codec.step_columns import StepColumns
    from shared.messages import JoinRequest

__all__ = ["Executor", "OnStep"]


class OnStep(Protocol):
    """Told of each step that has ended, in the compute thread."""

    def __call__(self, outcome: Outcome, /) -> None:
        """Take note."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    plan: StepColumns
    received_ns: int
    prepared: PreparedStep | Exception | None
    """None where there is nothing to compute; the error where the plan could not be prepared."""


class Executor:
    """Computes one epoch's steps on this rank. ``run`` is the thread; the other methods are for the event loop."""

    def __init__(self, request: JoinRequest, assembly: Assembly, *, clock: Clock, on_step: OnStep) -> None:
        self._request = request
        self._assembly: Assembly | None = assembly
        self._communicator = assembly.communicator
        self._device = assembly.loaded.place.device
        self._makes_logits = makes_logits(request)
        self._samples = samples_tokens(request)
        self._clock = clock
        self._on_step = on_step
        self._arrivals: queue.SimpleQueue[_Arrival | None] = queue.SimpleQueue()
        self._is_stopped = False
        self._untold: list[Outcome] = []
        self._preparer = StepPreparer(request, assembly.joined, assembly.loaded.vocabulary, self._device)
        self._last_token_ids = torch.zeros(MAX_ROWS, dtype=torch.int64, device=self._device)
        """[rows] the token sampled last for each row of the sequence table; the compute thread's alone."""

    def submit(self, plan: StepColumns, received_ns: int) -> None:
        """Prepare and queue a plan; bounding the queue is the caller's part. What is wrong with it ``run`` will say."""
        self._arrivals.put(_Arrival(plan, received_ns, self._prepare(plan)))

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
            self._preparer.close()
            assembly.loaded.ranks.attach(None)
            self._communicator.close()
        return failure

    def abort(self) -> None:
        """End communication under way where the backend can (NCCL)."""
        self._communicator.abort()

    def _prepare(self, plan: StepColumns) -> PreparedStep | Exception | None:
        try:
            return self._preparer.prepare(plan)
        except Exception as error:  # noqa: BLE001 - for the compute thread to report, once the steps before are done
            return error

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
        plan, step = arrival.plan, arrival.prepared
        if isinstance(step, Exception):
            raise step
        if step is None:
            now_ns = self._clock.now_ns()
            self._untold.append(Outcome(plan, arrival.received_ns, now_ns, now_ns))
            return
        if step.late is not None:
            step.late.fill(step.inputs.token_ids, self._last_token_ids)
        self._tell()
        stage = assembly.loaded.stage
        hidden = self._communicator.receive(step.inputs.num_tokens)
        started_ns = self._clock.now_ns()
        hidden = stage.forward(step.inputs, hidden, assembly.kv)
        ended_ns = self._clock.now_ns()
        self._communicator.send(hidden)
        chosen, prompt_scores = None, list[PromptScores]()
        if self._makes_logits:
            prompt_scores = [score_prompt(piece, hidden, stage.logits) for piece in step.prompt_pieces]
            chosen = self._sample(step, assembly.loaded, hidden)
            ended_ns = self._clock.now_ns()
        self._untold.append(Outcome(plan, arrival.received_ns, started_ns, ended_ns, chosen, prompt_scores))

    def _sample(self, step: PreparedStep, loaded: LoadedStage, hidden: Tensor) -> ChosenTokens | None:
        if not len(step.sampled_rows):
            return None
        if step.sampling is None and loaded.greedy is not None:
            token_ids, invalid = loaded.greedy(hidden, step.inputs.sample_rows)
            chosen = ChosenTokens(token_ids, token_ids.tolist(), invalid, None)
        else:
            rows = hidden[step.inputs.sample_rows]
            logits = loaded.stage.logits(rows)  # all ranks together, even those that do not sample
            if not self._samples:
                return None
            chosen = choose(logits, step.sampling or greedy_columns(len(rows)), step.wishes)
        self._last_token_ids.index_copy_(0, step.sampled_rows, chosen.on_device)
        return chosen

    def _tell(self) -> None:
        """Tell what has been done since the last time.

        Whoever hears it competes for the interpreter. Where the next plan is here already, its inputs are made first,
        and the listener runs while the device, or the layers outside the interpreter, compute.
        """
        for outcome in self._untold:
            self._on_step(outcome)
        self._untold.clear()


def _shape(plan: StepColumns) -> dict[str, list[int]]:
    """What of a plan goes into a log: all but tokens, which are the users' own."""
    return {
        "rows": plan.rows.tolist(),
        "num_computed_tokens": plan.num_computed_tokens.tolist(),
        "num_tokens": plan.num_tokens.tolist(),
        "num_new_blocks": [] if plan.new_blocks is None else plan.new_blocks.counts.tolist(),
        "new_rows": [sequence.row for sequence in plan.new_sequences],
        "released_rows": list(plan.released_rows),
    }
