"""What the scheduler counts.

``LoopMetrics`` is told by the loop as things happen; ``EngineMetrics`` asks for the engine's status when it is scraped,
so that what the core counts anyway costs nothing. They balance: sequences submitted = sequences ended, by every reason
and refusals included, + running + waiting.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from shared.messages import FinishReason
from shared.metrics import COUNT_BOUNDS, REQUEST_BOUNDS_S, STEP_BOUNDS_S, Histogram
from shared.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.core import Metric

    from services.scheduler.core.sequence import Sequence
    from shared.messages import EngineStatus

__all__ = ["EngineMetrics", "LoopMetrics"]

_REFUSED = "refused"
_WORKER_STATES = ("missing", "registered", "loading", "ready", "failed")


class LoopMetrics(Collector):
    """Sequences and iterations, as the loop sees them. For its task alone."""

    def __init__(self) -> None:
        self._num_submitted = 0
        self._num_ended: Counter[tuple[str, StatusCode]] = Counter(
            dict.fromkeys(
                [
                    ("stop", StatusCode.OK),
                    ("length", StatusCode.OK),
                    ("cancelled", StatusCode.CANCELLED),
                    ("error", StatusCode.INTERNAL),
                    (_REFUSED, StatusCode.RESOURCE_EXHAUSTED),
                ],
                0,
            )
        )
        self._sent: deque[int] = deque()
        """When each iteration in flight was sent, nanoseconds."""
        self._queue_time = Histogram(
            "orca_request_queue_time_seconds", "From a sequence's receipt to its first schedule.", REQUEST_BOUNDS_S
        )
        self._prefill_time = Histogram(
            "orca_request_prefill_time_seconds",
            "From a sequence's first schedule to its first token.",
            REQUEST_BOUNDS_S,
        )
        self._decode_time = Histogram(
            "orca_request_decode_time_seconds", "From a sequence's first token to its last.", REQUEST_BOUNDS_S
        )
        self._iteration_time = Histogram(
            "orca_iteration_duration_seconds",
            "From sending an iteration to its result; several overlap in the pipeline.",
            STEP_BOUNDS_S,
        )
        self._iteration_requests = Histogram(
            "orca_iteration_requests", "Requests in one iteration (batch size).", COUNT_BOUNDS
        )
        self._iteration_tokens = Histogram(
            "orca_iteration_tokens", "Tokens computed in one iteration, of prompts and outputs.", COUNT_BOUNDS
        )

    def submitted(self) -> None:
        """A session submitted a sequence, which may still be refused."""
        self._num_submitted += 1

    def refused(self, code: StatusCode) -> None:
        """A sequence did not get into the pool."""
        self._num_ended[_REFUSED, code] += 1

    def ended(self, sequence: Sequence, reason: FinishReason) -> None:
        """A sequence left the pool."""
        code = {FinishReason.CANCELLED: StatusCode.CANCELLED, FinishReason.ERROR: StatusCode.INTERNAL}.get(reason)
        self._num_ended[reason.name.lower(), StatusCode.OK if code is None else code] += 1
        scheduled, first, last = sequence.scheduled_ns, sequence.first_token_ns, sequence.last_token_ns
        if scheduled is not None:
            self._queue_time.observe((scheduled - sequence.arrived_ns) / 1e9)
            if first is not None and last is not None:
                self._prefill_time.observe((first - scheduled) / 1e9)
                self._decode_time.observe((last - first) / 1e9)

    def sent(self, sent_ns: int, num_requests: int, num_tokens: int) -> None:
        """An iteration is on its way."""
        self._sent.append(sent_ns)
        self._iteration_requests.observe(num_requests)
        self._iteration_tokens.observe(num_tokens)

    def applied(self, now_ns: int) -> None:
        """The oldest iteration in flight is back."""
        self._iteration_time.observe((now_ns - self._sent.popleft()) / 1e9)

    def engine_lost(self) -> None:
        """What is in flight will never come back."""
        self._sent.clear()

    def collect(self) -> Iterable[Metric]:
        """Give all as it is now."""
        ended = CounterMetricFamily(
            "orca_sequences_ended",
            "Sequences that left the scheduler, or were refused by it, by reason and status.",
            labels=["reason", "code"],
        )
        for (reason, code), count in self._num_ended.items():
            ended.add_metric([reason, code.name], count)
        yield CounterMetricFamily(
            "orca_sequences_submitted", "Sequences that gateways submitted, refused ones included.", self._num_submitted
        )
        yield ended
        for histogram in (
            self._queue_time,
            self._prefill_time,
            self._decode_time,
            self._iteration_time,
            self._iteration_requests,
            self._iteration_tokens,
        ):
            yield from histogram.collect()


class EngineMetrics(Collector):
    """The engine's status as metrics."""

    def __init__(self, status: Callable[[], EngineStatus], *, has_prefix_cache: bool = True) -> None:
        self._status = status
        self._has_prefix_cache = has_prefix_cache

    def collect(self) -> Iterable[Metric]:
        """Ask for the status and translate it."""
        status = self._status()
        yield _gauge("orca_engine_ready", "1 while the engine serves.", status.ready)
        yield _counter("orca_epochs", "Times that the workers were called to a fresh process group.", status.epoch)
        if status.info is not None:
            info = status.info
            shape = {"num_stages": str(info.num_stages), "tp_size": str(info.tp_size)}
            yield InfoMetricFamily(
                "orca_engine", "What the engine is.", {"model": info.model, "dtype": info.dtype, **shape}
            )
        yield from _kv_cache(status)
        workers = GaugeMetricFamily("orca_workers", "Ranks by what their worker is doing.", labels=["state"])
        states = Counter(worker.state for worker in status.workers)
        for state in _WORKER_STATES:
            workers.add_metric([state], states[state])
        yield workers
        yield _gauge("orca_num_requests_running", "Sequences that have started.", status.num_running)
        yield _gauge("orca_num_requests_waiting", "Sequences in the queue.", status.num_waiting)
        yield _gauge(
            "orca_num_requests_preempted", "Of those in the queue: had started and were put back.", status.num_preempted
        )
        yield _gauge(
            "orca_iterations_in_flight", "Iterations sent whose results are not back.", status.num_in_flight_steps
        )
        yield _counter("orca_num_preemptions", "Sequences put back for want of K/V.", status.num_preemptions)
        yield _counter("orca_prompt_tokens", "Prompt tokens of sequences that have started.", status.num_prompt_tokens)
        yield _counter("orca_generation_tokens", "Tokens generated.", status.num_output_tokens)
        yield _counter(
            "orca_prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            status.num_prompt_tokens if self._has_prefix_cache else 0,
        )
        yield _counter(
            "orca_prefix_cache_hits", "Prompt tokens found in the prefix cache.", status.num_cached_prompt_tokens
        )
        yield _counter(
            "orca_invariant_violations",
            "Invariants of the scheduler found broken; anything but 0 is a bug.",
            status.num_broken_invariants,
        )


def _kv_cache(status: EngineStatus) -> Iterable[Metric]:
    num_slots = 0 if status.info is None else status.info.num_slots
    slots = GaugeMetricFamily(
        "orca_kv_cache_slots",
        "K/V slots, one a token: used by sequences, kept by the prefix cache, or free.",
        labels=["state"],
    )
    slots.add_metric(["used"], status.num_used_slots)
    slots.add_metric(["cached"], status.num_cached_slots)
    slots.add_metric(["free"], max(0, num_slots - status.num_used_slots - status.num_cached_slots))
    yield slots
    yield _gauge(
        "orca_kv_cache_usage_ratio",
        "Share of the K/V slots that sequences use, 0 to 1.",
        status.num_used_slots / num_slots if num_slots else 0.0,
    )


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(name, documentation, value)


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(name, documentation, value)
