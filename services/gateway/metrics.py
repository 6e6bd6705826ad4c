"""What a gateway counts: requests, how they ended, and what their clients waited for.

They balance: requests received = requests ended, for every reason, + requests in flight. Prompts, outputs, ids and
keys are in none of them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from shared.messages import FinishReason
from shared.metrics import COUNT_BOUNDS, FIRST_TOKEN_BOUNDS_S, REQUEST_BOUNDS_S, TOKEN_BOUNDS_S, Histogram
from shared.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from services.gateway.observation import RequestRecord
    from services.gateway.request_limit import RequestLimit

__all__ = ["GatewayMetrics"]

_METHODS = ("Generate", "Chat")
_REFUSALS = frozenset(
    {
        *(StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND, StatusCode.PERMISSION_DENIED, StatusCode.UNIMPLEMENTED),
        *(StatusCode.RESOURCE_EXHAUSTED, StatusCode.FAILED_PRECONDITION, StatusCode.UNAUTHENTICATED),
    }
)
_USUAL_ENDINGS = (
    ("stop", StatusCode.OK),
    ("length", StatusCode.OK),
    ("tool_calls", StatusCode.OK),
    ("cancelled", StatusCode.CANCELLED),
    ("deadline", StatusCode.DEADLINE_EXCEEDED),
    ("refused", StatusCode.INVALID_ARGUMENT),
    ("refused", StatusCode.RESOURCE_EXHAUSTED),
    ("error", StatusCode.INTERNAL),
)
"""Told from the start, so that rates of them have a beginning."""


class GatewayMetrics(Collector):
    """The metrics of one gateway; a ``RequestObserver``."""

    def __init__(self, limit: RequestLimit) -> None:
        self._limit = limit
        self._num_received: Counter[str] = Counter(dict.fromkeys(_METHODS, 0))
        self._num_ended: Counter[tuple[str, StatusCode]] = Counter(dict.fromkeys(_USUAL_ENDINGS, 0))
        self._num_in_flight = 0
        self._first_token = Histogram(
            "orca_time_to_first_token_seconds", "From a request's receipt to its first token.", FIRST_TOKEN_BOUNDS_S
        )
        self._token_interval = Histogram(
            "orca_inter_token_latency_seconds", "Between tokens of an output, as clients get them.", TOKEN_BOUNDS_S
        )
        self._token_mean = Histogram(
            "orca_time_per_output_token_seconds",
            "Mean time between tokens over a whole output, the first token aside.",
            TOKEN_BOUNDS_S,
        )
        self._latency = Histogram(
            "orca_e2e_request_latency_seconds", "From a request's receipt to its end.", REQUEST_BOUNDS_S
        )
        self._prompt_tokens = Histogram("orca_request_prompt_tokens", "Prompt tokens of a request.", COUNT_BOUNDS)
        self._output_tokens = Histogram("orca_request_generation_tokens", "Output tokens of a request.", COUNT_BOUNDS)

    def received(self, record: RequestRecord) -> None:
        """Take note."""
        self._num_received[record.method] += 1
        self._num_in_flight += 1

    def first_token(self, record: RequestRecord) -> None:
        """Take note."""
        assert record.first_token_ns is not None
        self._first_token.observe((record.first_token_ns - record.received_ns) / 1e9)

    def more_tokens(self, interval_ns: int, num_tokens: int) -> None:
        """Take note of tokens that came ``interval_ns`` after the ones before, each."""
        self._token_interval.observe(interval_ns / 1e9, num_tokens)

    def ended(self, record: RequestRecord) -> None:
        """Take note."""
        self._num_in_flight -= 1
        self._num_ended[_reason(record), record.code] += 1
        self._latency.observe((record.ended_ns - record.received_ns) / 1e9)
        if record.num_prompt_tokens:
            self._prompt_tokens.observe(record.num_prompt_tokens)
            self._output_tokens.observe(record.num_output_tokens)
        for finish in record.finishes:
            if finish.num_output_tokens > 1:
                self._token_mean.observe(finish.decode_ms / 1e3 / (finish.num_output_tokens - 1))

    def collect(self) -> Iterable[Metric]:
        """Give all as it is now."""
        received = CounterMetricFamily(
            "orca_requests_received", "Requests that came in, by whatever API.", labels=["method"]
        )
        for method, count in self._num_received.items():
            received.add_metric([method], count)
        yield received
        ended = CounterMetricFamily(
            "orca_requests_ended", "Requests that ended, by reason and status.", labels=["reason", "code"]
        )
        for (reason, code), count in self._num_ended.items():
            ended.add_metric([reason, code.name], count)
        yield ended
        yield GaugeMetricFamily(
            "orca_requests_in_flight", "Requests received that have not ended.", self._num_in_flight
        )
        yield GaugeMetricFamily(
            "orca_requests_in_service",
            "Choices of requests that have a place (--max-requests).",
            self._limit.num_in_service,
        )
        yield GaugeMetricFamily(
            "orca_requests_queued", "Choices of requests that wait for a place.", self._limit.num_queued
        )
        for histogram in (
            self._first_token,
            self._token_interval,
            self._token_mean,
            self._latency,
            self._prompt_tokens,
            self._output_tokens,
        ):
            yield from histogram.collect()


def _reason(record: RequestRecord) -> str:
    """How a request ended, in one word."""
    match record.code:
        case StatusCode.OK:
            reasons = {finish.reason for finish in record.finishes} or {FinishReason.LENGTH}
            return reasons.pop().name.lower() if len(reasons) == 1 else "mixed"
        case StatusCode.CANCELLED:
            return "cancelled"
        case StatusCode.DEADLINE_EXCEEDED:
            return "deadline"
        case StatusCode.UNAVAILABLE if not record.num_prompt_tokens:
            return "refused"
        case code:
            return "refused" if code in _REFUSALS else "error"
