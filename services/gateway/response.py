"""All outputs of one request as one series of deltas, in the order in which things happen.

If one output fails, the request fails. Whoever drops a response closes it: what has not ended is cancelled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.generation import Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.gateway.best_of import BestOf
    from services.gateway.candidates import Candidate
    from services.gateway.scheduler_client import SchedulerClient
    from services.gateway.streams import News
    from shared.errors import OrcaError
    from shared.generation import Delta, Finish

__all__ = ["Response"]


class Response:
    """The candidates of a request, which are its choices unless ``best_of`` drops some."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        news: News,
        scheduler: SchedulerClient,
        *,
        num_per_prompt: int,
        best_of: BestOf | None,
    ) -> None:
        """``news`` is told of the candidates by their indices; ``num_per_prompt`` of them share a prompt."""
        self._candidates = candidates
        self._news = news
        self._scheduler = scheduler
        self._num_per_prompt = num_per_prompt
        self._best_of = best_of
        self._num_open = len(candidates)
        self.finishes: list[Finish] = []
        """Of the candidates that have ended."""

    @property
    def is_done(self) -> bool:
        """Whether the last delta has been taken."""
        return self._num_open == 0

    def prompt_token_ids(self) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each prompt."""
        return tuple(tuple(first.stream.job.prompt_token_ids) for first in self._firsts())

    async def take(self) -> list[Delta]:
        """Wait for something new and return it; the last delta of all has the usage.

        Raises:
            OrcaError: an output failed, and so has the request.
        """
        deltas: list[Delta] = []
        for index in await self._news.take():
            candidate = self._candidates[index]
            delta = candidate.advance()
            if delta is None:
                continue
            if delta.finish is not None:
                self.finishes.append(delta.finish)
                self._num_open -= 1
                self._scheduler.close_stream(candidate.stream)
            if self._best_of is None:
                deltas.append(delta)
            else:
                deltas += self._best_of.add(delta)
        if self._num_open == 0:
            deltas[-1] = deltas[-1]._replace(usage=self.usage())
        return deltas

    def usage(self) -> Usage:
        """Return the tokens so far."""
        firsts = self._firsts()
        return Usage(
            num_prompt_tokens=sum(len(first.stream.job.prompt_token_ids) for first in firsts),
            num_output_tokens=sum(candidate.num_output_tokens for candidate in self._candidates),
            # What later candidates of a prompt find is the work of its first one.
            num_cached_tokens=sum(first.finish.num_cached_tokens for first in firsts if first.finish is not None),
        )

    def _firsts(self) -> Sequence[Candidate]:
        """The first candidate of each prompt."""
        return self._candidates[:: self._num_per_prompt]

    def fail(self, failure: OrcaError) -> None:
        """End the request with an error, at once."""
        self.close()
        self._news.fail(failure)

    def close(self) -> None:
        """Cancel what has not ended."""
        for candidate in self._candidates:
            self._scheduler.close_stream(candidate.stream)
