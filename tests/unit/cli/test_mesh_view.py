from __future__ import annotations

import io

import pytest
from rich.console import Console

from services.cli.client_access import ClientAccess
from services.cli.mesh_view import MeshView
from services.mesh import ServiceExit
from services.mesh.log_lines import parse_line
from shared.messages import EngineInfo

NAMES = ["scheduler", "gateway", "stage 0.0", "stage 1.0"]
INFO = EngineInfo("tiny", 512, 260, 4096, 16, 2, 1, "float32")


class Screen:
    def __init__(self, level: str = "info", *, terminal: bool = False, width: int = 100) -> None:
        self._file = io.StringIO()
        console = Console(file=self._file, width=width, force_terminal=terminal, _environ={})
        self.view = MeshView(console, NAMES, level)

    def show(self, service: str, text: str) -> None:
        self.view.take(parse_line(service, text))

    @property
    def lines(self) -> list[str]:
        return self._file.getvalue().splitlines()


def test_services_stand_side_by_side() -> None:
    screen = Screen()
    screen.show(
        "gateway", '{"event": "draining", "level": "info", "grace_s": 2.0, "timestamp": "T", "service": "gateway"}'
    )
    screen.show("stage 0.0", "a library [bold]speaks[/bold]")
    assert screen.lines == ["gateway   | draining grace_s=2.0", "stage 0.0 | a library [bold]speaks[/bold]"]


def test_long_lines_are_not_broken() -> None:
    screen = Screen()
    screen.show("gateway", "word " * 100)
    assert len(screen.lines) == 1


def test_a_traceback_keeps_its_lines() -> None:
    screen = Screen()
    screen.show(
        "scheduler", r'{"event": "service_failed", "level": "error", "exception": "Traceback\n  File\nValueError: 3"}'
    )
    assert screen.lines == [
        "scheduler | service_failed",
        "scheduler | Traceback",
        "scheduler |   File",
        "scheduler | ValueError: 3",
    ]


@pytest.mark.parametrize(("level", "shown"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_only_what_reaches_the_level_is_shown(level: str, shown: int) -> None:
    screen = Screen(level)
    for own in ("debug", "info", "warning", "error"):
        screen.show("gateway", f'{{"event": "x", "level": "{own}"}}')
    assert len(screen.lines) == shown


def test_progress_without_a_terminal_is_a_line_for_each_phase() -> None:
    screen = Screen()
    for phase, done in (("weights", 0), ("weights", 50), ("weights", 100), ("kv_cache", 0), ("kv_cache", 1)):
        screen.show(
            "stage 0.0", f'{{"event": "loading", "level": "info", "phase": "{phase}", "done": {done}, "total": 100}}'
        )
    assert len(screen.lines) == 2


def test_progress_on_a_terminal_is_in_the_spinner() -> None:
    screen = Screen(terminal=True)
    screen.view.start("starting tiny")
    for stage in (0, 1):
        screen.show(
            f"stage {stage}.0", '{"event": "loading", "level": "info", "phase": "weights", "done": 1, "total": 4}'
        )
    screen.view.stop_waiting()
    assert not [line for line in screen.lines if "| loading" in line]


def test_ready_says_what_to_type_next() -> None:
    screen = Screen()
    screen.view.ready("127.0.0.1:50051", "http://127.0.0.1:8000", INFO, 1.234)
    text = "\n".join(screen.lines)
    for said in (
        "ready in 1.2 s",
        "tiny, float32, context 512 tokens",
        "2 × 1",
        "4096 tokens",
        "127.0.0.1:50051",
        "http://127.0.0.1:8000/v1",
        "curl http://127.0.0.1:8000/v1/completions --json ",
        'orca generate "Once',
        "  orca chat\n",
        "  orca status\n",
    ):
        assert said in text
    assert "--address" not in text


def test_ready_on_another_port_says_the_address() -> None:
    screen = Screen()
    screen.view.ready("127.0.0.1:40000", "", INFO, 1)
    text = "\n".join(screen.lines)
    assert "orca chat --address 127.0.0.1:40000" in text
    assert "curl" not in text


def test_a_failure_is_told_after_its_last_lines_and_nothing_after_it() -> None:
    screen = Screen()
    last = ('{"event": "loading", "level": "info", "phase": "weights"}', "Killed")
    screen.view.failed(ServiceExit("stage 1.0", -9, "", last))
    screen.show("gateway", '{"event": "scheduler_lost", "level": "error"}')
    assert screen.lines == [
        "the last 2 lines of stage 1.0:",
        "stage 1.0 | loading phase=weights",
        "stage 1.0 | Killed",
        "stage 1.0 was killed by SIGKILL",
    ]


def test_what_clients_need_is_said_where_they_need_it() -> None:
    for access in (ClientAccess(), ClientAccess(needs_key=True)):
        screen = Screen()
        screen.view.ready("127.0.0.1:50051", "", INFO, 1, access)
        assert any("clients need  an API key" in line for line in screen.lines) is access.needs_key


def test_what_to_type_next_works_with_keys_and_certificates() -> None:
    screen = Screen(width=60)
    access = ClientAccess(needs_key=True, needs_tls=True, needs_certificate=True)
    screen.view.ready("127.0.0.1:50051", "https://127.0.0.1:8000", INFO, 1, access)
    text = "\n".join(screen.lines)
    own = " --client-cert client.pem --client-key client-key.pem"
    assert "try\n  export ORCA_API_KEY=…\n" in text
    assert f'  orca generate --tls-ca ca.pem{own} "Once upon a time"\n' in text
    assert f"  orca top --tls-ca ca.pem{own}\n" in text
    assert (
        "  curl --cacert ca.pem --cert client.pem --key client-key.pem "
        '-H "Authorization: Bearer $ORCA_API_KEY" https://127.0.0.1:8000/v1/completions --json '
    ) in text
