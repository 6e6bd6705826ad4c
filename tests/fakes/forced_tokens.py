"""A scheduler whose outputs are known: every sequence gets the tokens that a test says, and ends as it should."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from shared.messages import Ended, FinishReason, PromptLogprobs, SessionEvents, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from shared.messages import Submit
    from tests.fakes.fake_scheduler import FakeSession

__all__ = ["forced", "logprobs_of", "output_of"]


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """What is said of a token: the likelier the lower its id; it is not always among the most likely."""
    top = tuple((other, -0.25 * (other + 1)) for other in range(num_top))
    return TokenLogprobs(-0.25 * (token_id % 8 + 1), top)


def output_of(submit: Submit, token_ids: Sequence[int]) -> tuple[list[int], FinishReason | None]:
    """What a scheduler gives of ``token_ids``, and how that ends; None where it goes on."""
    output: list[int] = []
    for token_id in token_ids:
        stops = token_id in submit.stop_token_ids
        if stops and len(output) < submit.sampling.min_tokens:
            continue  # it is never sampled
        output.append(token_id)
        if stops:
            return output, FinishReason.STOP
        if len(output) == submit.max_tokens:
            return output, FinishReason.LENGTH
    return output, FinishReason.LENGTH if submit.max_tokens == 0 else None


@contextlib.asynccontextmanager
async def forced(
    session: FakeSession, choose: Callable[[Submit], Sequence[int]], *, at_once: int = 1
) -> AsyncIterator[list[Submit]]:
    """Answer the submits of a session, which are yielded as they come, with ``at_once`` tokens in each message."""
    submits: list[Submit] = []

    async def serve() -> None:
        while True:
            submit = await session.submits.get()
            submits.append(submit)
            _answer(session, submit, choose(submit), at_once)

    task = asyncio.create_task(serve())
    try:
        yield submits
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


def _answer(session: FakeSession, submit: Submit, token_ids: Sequence[int], at_once: int) -> None:
    handle, num_top = submit.handle, submit.sampling.num_logprobs
    if submit.num_prompt_logprobs is not None:
        prompt = submit.prompt_token_ids.tolist()
        for begin in range(1, len(prompt), 3):
            scored = [logprobs_of(token_id, submit.num_prompt_logprobs) for token_id in prompt[begin : begin + 3]]
            session.send(SessionEvents(prompt_logprobs=[(handle, PromptLogprobs(begin, tuple(scored)))]))
    output, reason = output_of(submit, token_ids)
    ended = [] if reason is None else [Ended(handle, reason, queue_ns=10, prefill_ns=20, decode_ns=30)]
    pieces = [output[begin : begin + at_once] for begin in range(0, len(output), at_once)] or [[]]
    for index, piece in enumerate(pieces):
        scores = {} if num_top is None else {place: logprobs_of(each, num_top) for place, each in enumerate(piece)}
        is_last = index == len(pieces) - 1
        session.send(SessionEvents([handle] * len(piece), piece, ended if is_last else [], token_logprobs=scores))
