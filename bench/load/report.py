"""A benchmark as JSON. The fields are listed in docs/command-line.md; ``SCHEMA_VERSION`` grows when one changes.

Prompts and keys are not in it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import orjson

from bench.load.records import Outcome

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from bench.load.benchmark import Benchmark, Run
    from bench.load.records import RequestRecord

__all__ = ["MAX_FAILURES", "SCHEMA_VERSION", "report_of", "write_json"]

SCHEMA_VERSION = 1
MAX_FAILURES = 20
"""Reasons that are listed of each run."""


def report_of(
    benchmark: Benchmark, *, created: datetime, version: str, label: str = "", detailed: bool = False
) -> dict[str, Any]:
    """Return the report; ``detailed`` adds every request."""
    config = benchmark.config
    return {
        "schema_version": SCHEMA_VERSION,
        "orca_version": version,
        "created": created.isoformat(timespec="seconds"),
        "label": label,
        "endpoint": {
            "url": config.endpoint.url,
            "model": config.options.model,
            "api": config.options.api.value,
            "prompt_format": config.options.prompt_format.value,
            "temperature": config.options.temperature,
            "ignore_eos": config.options.ignore_eos,
            "extra_body": dict(config.options.extra_body),
        },
        "trace": {
            "name": config.trace.name.value,
            "num_requests": config.trace.num_requests,
            "seed": config.trace.seed,
            "input_len": [config.trace.input_len.low, config.trace.input_len.high],
            "output_len": [config.trace.output_len.low, config.trace.output_len.high],
            "prefix_len": config.trace.prefix_len,
            "num_prefixes": config.trace.num_prefixes,
            "vocab_size": config.vocab_size,
        },
        "burstiness": config.burstiness,
        "num_warmups": config.num_warmups,
        "timeout_s": config.timeout_s,
        "goodput": {bound.metric.value: bound.max_ms for bound in config.bounds},
        "runs": [_run(run, detailed=detailed) for run in benchmark.runs],
    }


def write_json(report: dict[str, Any], path: Path) -> None:
    """Write a report. Raises ``OSError``."""
    path.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _run(run: Run, *, detailed: bool) -> dict[str, Any]:
    summary = asdict(run.summary)
    summary["failures"] = [asdict(failure) for failure in run.summary.failures[:MAX_FAILURES]]
    found = {
        "request_rate": run.level.request_rate,
        "max_concurrency": run.level.max_concurrency,
        "seed": run.seed,
        "was_stopped": run.was_stopped,
        "client_cpu": run.client_cpu,
        **summary,
    }
    if detailed and run.records:
        begin_ns = min(record.started_ns for record in run.records)
        found["requests"] = [_request(record, begin_ns) for record in run.records]
    return found


def _request(record: RequestRecord, begin_ns: int) -> dict[str, Any]:
    is_ok = record.outcome is Outcome.OK
    return {
        "index": record.index,
        "outcome": record.outcome.value,
        "error": record.error,
        "start_s": (record.started_ns - begin_ns) / 1e9,
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_output_tokens": record.num_output_tokens,
        "max_tokens": record.max_tokens,
        "ttft_ms": record.ttft_ms if is_ok else None,
        "e2e_ms": record.e2e_ms if is_ok else None,
        "event_times_ms": [(time_ns - record.started_ns) / 1e6 for time_ns in record.event_times_ns],
    }
