"""What a worker counts: steps, tokens, times and memory of its rank.

They balance: steps submitted = steps computed + steps dropped with their epoch + steps pending. Stage and rank are
labels, since that is how people tell workers apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from shared.metrics import COUNT_BOUNDS, STEP_BOUNDS_S, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from services.worker.outcome import Outcome
    from shared.messages import Joined, StepTiming

__all__ = ["WorkerMetrics"]


class WorkerMetrics(Collector):
    """The metrics of one rank; a ``StepObserver``."""

    def __init__(self, stage: int, tp_rank: int) -> None:
        labels = {"stage": str(stage), "tp_rank": str(tp_rank)}
        self._label_names = list(labels)
        self._label_values = list(labels.values())
        self._is_in_epoch = False
        self._weights_bytes = 0
        self._kv_cache_bytes = 0
        self._num_submitted = 0
        self._num_computed = 0
        self._num_dropped = 0
        self._duration = Histogram(
            "orca_worker_step_duration_seconds",
            "Computing one step; on a GPU, issuing it on all stages but the last.",
            STEP_BOUNDS_S,
            labels,
        )
        self._wait = Histogram(
            "orca_worker_step_wait_seconds",
            "From a step's arrival to its start: behind other steps, and for activations of the stage before.",
            STEP_BOUNDS_S,
            labels,
        )
        self._sizes = Histogram("orca_worker_step_tokens", "Tokens of one step.", COUNT_BOUNDS, labels)

    def epoch_began(self, joined: Joined) -> None:
        """Take note."""
        self._is_in_epoch = True
        self._weights_bytes = joined.weights_bytes
        self._kv_cache_bytes = joined.num_blocks * joined.kv_bytes_per_block

    def step_submitted(self) -> None:
        """Take note."""
        self._num_submitted += 1

    def step_ended(self, outcome: Outcome, timing: StepTiming) -> None:
        """Take note."""
        del outcome
        self._num_computed += 1
        self._duration.observe((timing.ended_ns - timing.started_ns) / 1e9)
        self._wait.observe((timing.started_ns - timing.received_ns) / 1e9)
        self._sizes.observe(timing.num_tokens)

    def epoch_over(self) -> None:
        """Take note."""
        self._is_in_epoch = False
        self._kv_cache_bytes = 0
        self._num_dropped += self._num_pending

    @property
    def _num_pending(self) -> int:
        return self._num_submitted - self._num_computed - self._num_dropped

    def collect(self) -> Iterable[Metric]:
        """Give all as it is now."""
        yield self._gauge("orca_worker_in_epoch", "1 while this rank is part of a running engine.", self._is_in_epoch)
        yield self._gauge("orca_worker_weights_bytes", "Size of this rank's weights.", self._weights_bytes)
        yield self._gauge("orca_worker_kv_cache_bytes", "Size of this rank's K/V.", self._kv_cache_bytes)
        yield self._counter("orca_worker_steps_submitted", "Steps put before the compute thread.", self._num_submitted)
        yield self._counter("orca_worker_steps_computed", "Steps that were computed.", self._num_computed)
        yield self._counter("orca_worker_steps_dropped", "Steps that ended with their epoch.", self._num_dropped)
        yield self._gauge("orca_worker_steps_pending", "Steps that wait or are being computed.", self._num_pending)
        for histogram in (self._duration, self._wait, self._sizes):
            yield from histogram.collect()

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, documentation, labels=self._label_names)
        family.add_metric(self._label_values, value)
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(name, documentation, labels=self._label_names)
        family.add_metric(self._label_values, value)
        return family
