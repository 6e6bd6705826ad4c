"""The numbers of the field, from records of requests: latencies, throughput, goodput, failures.

Pure. Latencies are in milliseconds and of requests that ended well; throughput counts those alone, too. Percentiles
interpolate between neighbours, as numpy's and hence vLLM's do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Self

import numpy as np

from bench.load.records import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.load.goodput import LatencyBound
    from bench.load.records import RequestRecord

__all__ = ["Distribution", "Failure", "Summary", "summarize"]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Values of one latency, in milliseconds."""

    num_values: int
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, values_ms: Sequence[float]) -> Self | None:
        """Sum up; None where there are no values."""
        if not values_ms:
            return None
        values = np.asarray(values_ms)
        p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
        return cls(len(values_ms), float(values.mean()), p50, p90, p99, float(values.max()))


@dataclass(frozen=True, slots=True)
class Failure:
    """Requests that failed for one reason."""

    message: str
    num_requests: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run measured."""

    duration_s: float
    """From the first request's start to the last one's end."""
    num_requests: int
    """Those that were sent, or should have been by the end."""
    num_ok: int
    num_failed: int
    num_cancelled: int
    """Still running when the run was stopped."""
    num_short: int
    """Ended well with fewer tokens than were asked for."""
    num_prompt_tokens: int
    num_output_tokens: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    tokens_per_event: float | None
    """Output tokens for each event that brought output: above 1, inter-token latencies are those of events."""
    goodput_per_s: float | None
    """Requests per second that kept all bounds; None where none were given."""
    goodput_ratio: float | None
    """Their part of all requests that ended, failures included."""
    ttft: Distribution | None
    """Time to first token."""
    tpot: Distribution | None
    """Time per output token after the first: one value for each request."""
    itl: Distribution | None
    """Inter-token latency: from one event with output to the next."""
    e2e: Distribution | None
    """End to end."""
    normalised: Distribution | None
    """End to end by output tokens, per token."""
    send_delay: Distribution | None
    """From a request's start to its sending: in an open loop, how late the client was or held requests back."""
    failures: tuple[Failure, ...]
    """Most frequent first."""


def summarize(records: Sequence[RequestRecord], bounds: Sequence[LatencyBound] = ()) -> Summary:
    """Sum up a run; ``bounds`` are those of its goodput."""
    ok = [record for record in records if record.outcome is Outcome.OK]
    failed = [record for record in records if record.outcome is Outcome.FAILED]
    duration_s = 0.0
    if records:
        duration_s = (max(r.ended_ns for r in records) - min(r.started_ns for r in records)) / 1e9
    num_good = sum(all(bound.is_kept(record) for bound in bounds) for record in ok)
    num_ended = len(ok) + len(failed)
    num_events = sum(len(record.event_times_ns) for record in ok)
    num_prompt_tokens = sum(record.num_prompt_tokens for record in ok)
    num_output_tokens = sum(record.num_output_tokens for record in ok)

    def per_s(number: int) -> float:
        return number / duration_s if duration_s > 0 else 0.0

    return Summary(
        duration_s=duration_s,
        num_requests=len(records),
        num_ok=len(ok),
        num_failed=len(failed),
        num_cancelled=len(records) - num_ended,
        num_short=sum(record.num_output_tokens < record.max_tokens for record in ok),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        requests_per_s=per_s(len(ok)),
        input_tokens_per_s=per_s(num_prompt_tokens),
        output_tokens_per_s=per_s(num_output_tokens),
        tokens_per_event=num_output_tokens / num_events if num_events else None,
        goodput_per_s=per_s(num_good) if bounds else None,
        goodput_ratio=num_good / num_ended if bounds and num_ended else None,
        ttft=Distribution.of([record.ttft_ms for record in ok]),
        tpot=Distribution.of([tpot for record in ok if (tpot := record.tpot_ms) is not None]),
        itl=Distribution.of([(b - a) / 1e6 for record in ok for a, b in pairwise(record.event_times_ns)]),
        e2e=Distribution.of([record.e2e_ms for record in ok]),
        normalised=Distribution.of([record.normalised_ms for record in ok]),
        send_delay=Distribution.of([(record.sent_ns - record.started_ns) / 1e6 for record in ok]),
        failures=tuple(Failure(*item) for item in Counter(record.error for record in failed).most_common()),
    )
