"""``orca status``: the engine behind a gateway, at a glance or as JSON."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.calls import told_plainly
from services.cli.connection import Connection, takes_connection

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shared.client import GatewayStatus
    from shared.messages import EngineStatus

__all__ = ["status"]

_STATE_STYLES = {"ready": "green", "failed": "bold red", "missing": "red"}


@takes_connection
def status(
    connection: Connection,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show whether the mesh is ready, what it serves and how busy it is."""
    with told_plainly(connection.address), connection.open() as client:
        found = client.status()
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
        return
    from rich.console import Console

    console = Console()
    for part in (_summary(found), _workers(found.engine)):
        console.print(part)


def _summary(found: "GatewayStatus") -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    engine = found.engine
    hit_rate = engine.num_cached_prompt_tokens / max(1, engine.num_prompt_tokens)
    rows = {
        "state": Text("ready", "bold green") if engine.ready else Text(f"not ready: {engine.reason}", "bold yellow")
    }
    if (info := engine.info) is not None:
        slots = (
            f"{info.num_slots} tokens: {engine.num_used_slots} used, {engine.num_cached_slots} cached, "
            f"{info.num_slots - engine.num_used_slots - engine.num_cached_slots} free; blocks of {info.block_size}"
        )
        rows |= {
            "model": Text(f"{info.model}, {info.dtype}, context {info.max_model_len} tokens"),
            "topology": Text(f"{info.num_stages} × {info.tp_size} (pipeline stages × tensor-parallel ranks)"),
            "K/V slots": Text(slots),
        }
    rows |= {
        "requests": Text(
            f"{engine.num_running} running, {engine.num_waiting} waiting "
            f"({engine.num_preempted} preempted), {engine.num_finished} finished, "
            f"{found.num_gateway_requests} at this gateway"
        ),
        "iterations": Text(f"{engine.num_in_flight_steps} in flight, {engine.num_steps} in all, epoch {engine.epoch}"),
        "last batch": Text(f"{engine.last_batch_size} requests, {engine.last_batch_tokens} tokens"),
        "prefix cache": Text(
            f"{hit_rate:.0%} of prompt tokens found ({engine.num_cached_prompt_tokens} of {engine.num_prompt_tokens})"
        ),
        "preemptions": Text(str(engine.num_preemptions)),
        "output": Text(f"{engine.num_output_tokens} tokens"),
    }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), value)
    return table


def _workers(engine: "EngineStatus") -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("stage", "rank", "state", "address", ""):
        table.add_column(column)
    for worker in engine.workers:
        state = Text(worker.state, _STATE_STYLES.get(worker.state, "yellow"))
        table.add_row(str(worker.stage), str(worker.tp_rank), state, Text(worker.address), Text(worker.detail))
    return table
