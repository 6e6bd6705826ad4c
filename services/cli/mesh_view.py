"""What ``orca up`` shows: the services' log lines side by side, what is being loaded, readiness, the cause of an end.

It knows the terminal and not the processes.
"""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from services.cli.client_access import ClientAccess
from services.mesh.log_lines import parse_line
from shared.log import LEVELS

if TYPE_CHECKING:
    from rich.console import Console

    from services.mesh import LogLine, ServiceExit
    from shared.messages import EngineInfo

__all__ = ["MeshView"]

_LEVEL_STYLES = {"debug": "dim", "info": "", "warning": "yellow", "error": "bold red"}
_SERVICE_STYLES = {"scheduler": "magenta", "gateway": "cyan"}
_STAGE_STYLES = ("green", "blue", "bright_cyan", "bright_magenta")
_SAID_BY_PREFIX = {"timestamp", "service", "stage", "tp_rank"}
_TOLD_BELOW = {"exception", "stack"}
_OPEN = ClientAccess()


class MeshView:
    """The supervisor's side of the terminal."""

    def __init__(self, console: "Console", names: list[str], level: str) -> None:
        self._console = console
        self._width = max(len(name) for name in names)
        self._styles = {name: _SERVICE_STYLES.get(name, _STAGE_STYLES[at % 4]) for at, name in enumerate(names)}
        self._least = LEVELS.index(level)
        self._muted = False
        self._loading: dict[str, str] = {}
        self._spinner = console.status("") if console.is_terminal else None

    def start(self, what: str) -> None:
        """Say what is being started, and show until ``stop_waiting`` that something goes on."""
        self.say(what)
        if self._spinner is not None:
            self._spinner.update("loading the model")
            self._spinner.start()

    def stop_waiting(self) -> None:
        """Take the spinner away."""
        if self._spinner is not None:
            self._spinner.stop()

    def say(self, message: str, style: str = "bold") -> None:
        """Print a line of the supervisor's own."""
        self._print(Text(message, style=style))

    def take(self, line: "LogLine") -> None:
        """Show a line of a service, unless it is below the level; progress goes to the spinner."""
        if self._muted:
            return
        if line.event == "loading" and self._note_loading(line):
            return
        if line.level not in LEVELS or LEVELS.index(line.level) >= self._least:
            self._print(*self._rendered(line))

    def ready(self, address: str, url: str, info: "EngineInfo", seconds: float, access: ClientAccess = _OPEN) -> None:
        """Print what is served, where, and what to type next; ``url`` is that of HTTP, empty where it is off."""
        self.stop_waiting()
        table = Table.grid(padding=(0, 2))
        at = ("" if address == "127.0.0.1:50051" else f" --address {address}") + access.orca_options
        orca = _own_command()
        topology = f"{info.num_stages} × {info.tp_size} (pipeline stages × tensor-parallel ranks)"
        rows = {
            "model": f"{info.model}, {info.dtype}, context {info.max_model_len} tokens",
            "topology": topology,
            "K/V slots": f"{info.num_slots} tokens",
            "gRPC": address,
            "HTTP": f"{url}/v1 (OpenAI's API)" if url else "off",
            **({"page": f"{url}/"} if url else {}),
            **({"clients need": access.words} if access.words else {}),
        }
        for name, value in rows.items():
            table.add_row(Text(name, style="bold"), Text(value))
        commands = [
            *([access.exports] if access.exports else []),
            f'{orca} generate{at} "Once upon a time"',
            *(f"{orca} {command}{at}" for command in ("chat", "status", "top")),
        ]
        if url:
            body = '{"prompt": "Once upon a time"}'
            commands.append(f"curl{access.curl_options} {url}/v1/completions --json '{body}'")
        self._console.print(
            Panel(table, title=f"ready in {seconds:.1f} s, Ctrl-C stops it", border_style="green", expand=False)
        )
        # Below the panel and unbroken, so that they can be copied as they are.
        self.say("try")
        self._print(*(Text(f"  {command}", style="cyan") for command in commands))

    def failed(self, service_exit: "ServiceExit") -> None:
        """Tell which process ended, how, and what it said last; its neighbours' complaints are not shown after it."""
        self.stop_waiting()
        self._muted = True
        last = [parse_line(service_exit.name, text) for text in service_exit.last_lines]
        if last:
            self.say(f"the last {len(last)} lines of {service_exit.name}:")
        for line in last:
            self._print(*self._rendered(line))
        # Last, where people look first.
        self.say(service_exit.summary, "bold red")

    def _note_loading(self, line: "LogLine") -> bool:
        """Keep what a service is loading; True where the spinner shows it, so that no line has to."""
        phase = str(line.fields.get("phase", ""))
        done, total = line.fields.get("done"), line.fields.get("total")
        share = f" {100 * done // total} %" if isinstance(done, int) and isinstance(total, int) and total else ""
        known = self._loading.get(line.service, "")
        self._loading[line.service] = phase.replace("_", " ") + share
        if self._spinner is None:
            # Without a terminal, one line for each phase is enough.
            return known.startswith(phase.replace("_", " "))
        self._spinner.update(" · ".join(f"{name}: {what}" for name, what in sorted(self._loading.items())))
        return True

    def _rendered(self, line: "LogLine") -> list[Text]:
        style = _LEVEL_STYLES.get(line.level, "")
        if line.event is None:
            return [self._prefixed(line.service, Text(line.text, style="dim"))]
        text = Text(line.event, style=style or "bold")
        for key, value in line.fields.items():
            if key not in _SAID_BY_PREFIX and key not in _TOLD_BELOW:
                text.append(f" {key}=", style="dim").append(str(value), style=style)
        below = [part for key in sorted(_TOLD_BELOW) for part in str(line.fields.get(key, "")).splitlines()]
        return [self._prefixed(line.service, part) for part in [text, *(Text(row, style="dim") for row in below)]]

    def _prefixed(self, service: str, text: Text) -> Text:
        return Text(f"{service:<{self._width}} | ", style=self._styles.get(service, "")).append_text(text)

    def _print(self, *texts: Text) -> None:
        for text in texts:
            self._console.print(text, soft_wrap=True, highlight=False)


def _own_command() -> str:
    """How to call this program from the folder that the user is in."""
    called = Path(sys.argv[0])
    if called.name != "orca" or shutil.which("orca") == str(called.absolute()):
        return "orca"
    return str(called.relative_to(Path.cwd()) if called.is_relative_to(Path.cwd()) else called)
