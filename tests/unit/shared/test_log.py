from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from shared.log import LEVELS, configure_logging, get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    structlog.contextvars.clear_contextvars()
    structlog.reset_defaults()


@pytest.fixture
def events(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[dict[str, Any]]]:
    """What has been logged on standard error since the last look."""
    return lambda: [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_json_where_there_is_no_terminal(events: Callable[[], list[dict[str, Any]]]) -> None:
    configure_logging(service="worker", stage=1)
    get_logger().info("step_done", step_id=3)
    (event,) = events()
    assert event.pop("timestamp").endswith("Z")
    assert event == {"event": "step_done", "level": "info", "service": "worker", "stage": 1, "step_id": 3}


def test_pretty_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    configure_logging(service="worker")
    get_logger().warning("careful")
    shown = capsys.readouterr().err
    assert "careful" in shown
    assert not shown.startswith("{")


def test_the_choice_can_be_made(events: Callable[[], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    configure_logging(json=True)
    get_logger().info("x")
    assert events()[0]["event"] == "x"


@pytest.mark.parametrize("level", LEVELS)
def test_levels(events: Callable[[], list[dict[str, Any]]], level: str) -> None:
    configure_logging(level)
    for each in LEVELS:
        getattr(get_logger(), each)("said")
    assert [event["level"] for event in events()] == list(LEVELS[LEVELS.index(level) :])


def test_tracebacks_are_a_field(events: Callable[[], list[dict[str, Any]]]) -> None:
    configure_logging()
    get_logger().error("failed", exc_info=ValueError("why"))
    assert events()[0]["exception"].endswith("ValueError: why")


def test_a_line_that_cannot_be_written_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1, encoding="utf-8") as full:  # noqa: PTH123 - as standard error is opened
        monkeypatch.setattr(sys, "stderr", full)
        configure_logging(json=True)
        for _ in range(100):
            get_logger().info("said", what="x" * 1000)
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            full.close()
    full.close()
    get_logger().info("closed")
