"""Ready-made objects for tests; every argument has a small default."""

from __future__ import annotations

from services.scheduler.core.capacity import Capacity
from services.scheduler.core.core import SchedulerCore
from shared.config import SchedulingConfig
from shared.ids import Epoch, Handle, RequestId
from shared.messages import SamplingParams, StepPlan, StepResult, Submit, token_ids

SESSION = "gateway"

ORCA = SchedulingConfig(
    max_batch_size=8,
    max_waiting=1000,
    kv_policy="reserve",
    chunked_prefill=False,
    prefix_cache=False,
    run_ahead=0,
    split_over_stages=False,
)
"""Algorithm 1 as it stands in the paper."""


def make_submit(
    handle: int = 0,
    *,
    prompt: int = 4,
    max_tokens: int = 4,
    stop: frozenset[int] = frozenset(),
    output: int = 0,
    num_prompt_logprobs: int | None = None,
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
        num_prompt_logprobs=num_prompt_logprobs,
    )


def make_core(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    num_stages: int = 1,
    max_model_len: int = 1024,
    scheduling: SchedulingConfig = ORCA,
) -> SchedulerCore:
    """A core whose engine is ready; plain ORCA unless told otherwise."""
    core = SchedulerCore(scheduling)
    core.engine_ready(Epoch(1), Capacity(num_blocks, block_size, num_stages, max_model_len, vocab_size=1000))
    return core


def make_result(plan: StepPlan, token_id: int = 7) -> StepResult:
    """The same token for every sequence of a plan that samples."""
    return StepResult(plan.epoch, plan.step_id, [token_id] * sum(plan.samples))
