"""Ready-made objects for tests; every argument has a small default."""

from __future__ import annotations

from services.scheduler.core.core import Capacity, SchedulerCore
from shared.ids import Epoch, Handle, RequestId
from shared.messages import SamplingParams, StepPlan, StepResult, Submit, token_ids

SESSION = "gateway"


def make_submit(
    handle: int = 0, *, prompt: int = 4, max_tokens: int = 4, stop: frozenset[int] = frozenset(), output: int = 0
) -> Submit:
    """A request of ``prompt`` tokens, with ``output`` tokens generated already."""
    return Submit(
        handle=Handle(handle),
        request_id=RequestId(f"request-{handle}"),
        prompt_token_ids=token_ids(range(1, prompt + 1)),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0.0),
        stop_token_ids=stop,
        output_token_ids=token_ids(range(1, output + 1)),
    )


def make_core(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    num_stages: int = 1,
    max_batch_size: int = 8,
    max_waiting: int = 1000,
    max_model_len: int = 1024,
) -> SchedulerCore:
    """A core whose engine is ready."""
    core = SchedulerCore(max_batch_size=max_batch_size, max_waiting=max_waiting)
    core.engine_ready(Epoch(1), Capacity(num_blocks, block_size, num_stages, max_model_len, vocab_size=1000))
    return core


def make_result(plan: StepPlan, token_id: int = 7) -> StepResult:
    """The same token for every sequence of a plan that samples."""
    return StepResult(plan.epoch, plan.step_id, [token_id] * sum(plan.samples))
