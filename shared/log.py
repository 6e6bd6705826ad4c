"""Structured logs: pretty on a terminal, one JSON object a line otherwise; always on standard error.

Events are constant snake_case names with key=value beside them. ``request_id``, ``step_id``, ``stage`` and ``tp_rank``
are bound through context variables; ``shared.rpc`` carries the request id from service to service in gRPC metadata.
Prompts and outputs are never logged.
"""

from __future__ import annotations

import logging
import sys

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
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(**bound)


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """Return the process's logger."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger
