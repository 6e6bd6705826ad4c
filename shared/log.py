"""Structured logs: pretty on a terminal, one JSON object a line otherwise; always on standard error.

Events are constant snake_case names with key=value beside them. ``request_id``, ``step_id``, ``stage`` and ``tp_rank``
are bound through context variables; ``shared.rpc`` carries the request id from service to service in gRPC metadata.
Prompts and outputs are never logged. A line that cannot be written, to a full disk or a terminal that is gone, is lost:
no request may fail for it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TextIO, cast

import structlog

__all__ = ["LEVELS", "configure_logging", "get_logger"]

LEVELS = ("debug", "info", "warning", "error")


def configure_logging(level: str = "info", *, json: bool | None = None, **bound: object) -> None:
    """Set up the process's logs once, before anything heavy is imported.

    ``json`` None chooses by whether standard error is a terminal. ``bound`` is in every event: ``service``, ``stage`` …
    """
    as_json = not sys.stderr.isatty() if json is None else json
    # Tracebacks without the values of variables: there are prompts and keys among them.
    renderer: structlog.types.Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    )
    processors: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", _LossyFile(sys.stderr))),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(**bound)


class _LossyFile:
    """A file whose failures are nobody's business."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._file.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._file.flush()


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """Return the process's logger."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger
