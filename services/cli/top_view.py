"""What ``orca top`` shows: the latest snapshots of a mesh as one frame of text, as wide as there is room.

It knows neither the terminal nor the gateway: `MeshHistory` keeps what a frame needs, `Frame` draws it.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console, ConsoleOptions, RenderResult

    from shared.mesh_view import MeshSnapshot
    from shared.messages import EngineStatus, StepTiming

__all__ = ["Frame", "MeshHistory"]

_SPANS_S = (0.5, 1, 2, 5, 10, 30)
_KEPT_S = 31
_MAX_STEPS = 8192
_NUM_RATES = 120
_LEVELS = " ▁▂▃▄▅▆▇█"
_LABEL_WIDTH = 10
_NUMBER_WIDTH = 7

_DECODE, _PREFILL = "cyan", "yellow"
_USED, _CACHED, _FREE = "blue", "bright_black", "bright_black"
_STATE_STYLES = {"ready": "green", "failed": "bold red", "missing": "red"}


class MeshHistory:
    """The latest snapshot, and of those before what is shown over time."""

    def __init__(self) -> None:
        self.latest: MeshSnapshot | None = None
        self.trouble = ""
        """Why no snapshot comes any more; empty while they do."""
        self.lanes: dict[int, deque[StepTiming]] = {}
        """Iterations by stage, oldest first."""
        self.output_rates: deque[float] = deque(maxlen=_NUM_RATES)
        self.prefill_rates: deque[float] = deque(maxlen=_NUM_RATES)
        self._epoch = 0

    def add(self, snapshot: MeshSnapshot) -> None:
        """Take the next snapshot."""
        self.trouble = ""
        before, self.latest = self.latest, snapshot
        engine = snapshot.engine
        if before is not None and engine.taken_ns < before.engine.taken_ns:
            self.lanes.clear()  # another scheduler, or none: its clock has nothing to do with the one before
        if engine.output_tokens_per_s is not None:
            self.output_rates.append(engine.output_tokens_per_s)
        if engine.prefill_tokens_per_s is not None:
            self.prefill_rates.append(engine.prefill_tokens_per_s)
        if engine.status.ready and engine.status.epoch != self._epoch:
            self._epoch = engine.status.epoch
            self.lanes.clear()
        oldest_ns = engine.taken_ns - _KEPT_S * 10**9
        for timeline in engine.stages:
            lane = self.lanes.setdefault(timeline.stage, deque(maxlen=_MAX_STEPS))
            lane.extend(timeline.steps)
            while lane and lane[0].ended_ns < oldest_ns:
                lane.popleft()

    def step_s(self) -> float | None:
        """Usual time of an iteration on the first stage, seconds; None where there was none lately."""
        lane = next(iter(self.lanes.values()), ())
        latest = list(lane)[-64:]
        return statistics.median((step.ended_ns - step.started_ns) / 1e9 for step in latest) if latest else None


class Frame:
    """One frame, drawn for the width that it gets."""

    def __init__(self, history: MeshHistory) -> None:
        self._history = history

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw line by line."""
        del console
        width = options.max_width
        snapshot = self._history.latest
        if snapshot is None:
            yield Text(self._history.trouble or "waiting for the first snapshot …", "yellow")
            return
        status = snapshot.engine.status
        yield from self._head(snapshot, width)
        yield Text()
        yield from self._rates(width)
        yield Text()
        yield from self._lanes(snapshot.engine.taken_ns, width)
        yield Text()
        yield _cache(status, width)
        yield _queue(snapshot)
        yield Text()
        yield _workers(status)

    def _head(self, snapshot: MeshSnapshot, width: int) -> Iterable[Text]:
        status = snapshot.engine.status
        state = Text("● ready", "green") if status.ready else Text("● not ready", "yellow")
        if self._history.trouble:
            state = Text("● lost", "red")
        facts = f"gateway {snapshot.gateway_id}"
        if (info := status.info) is not None:
            facts = (
                f"{info.model} · {_plural(info.num_stages, 'stage')} × {_plural(info.tp_size, 'rank')} · {info.dtype}"
            )
        yield _fitted(Text.assemble(("orca top  ", "bold"), state, ("  " + facts, "dim")), width)
        reason = self._history.trouble or ("" if status.ready else status.reason)
        if reason:
            yield Text(reason, "yellow")

    def _rates(self, width: int) -> Iterable[Text]:
        history = self._history
        assert history.latest is not None
        engine = history.latest.engine
        line_width = max(0, width - _LABEL_WIDTH - 14)
        for name, rates, style in (
            ("output", history.output_rates, _DECODE),
            ("prefill", history.prefill_rates, _PREFILL),
        ):
            rate = f"{_rate(rates[-1] if rates else None):>{_NUMBER_WIDTH}} tok/s "
            yield Text.assemble(_label(name), rate, (_line(rates, line_width), style))
        step_s = history.step_s()
        parts = [
            "none yet" if step_s is None else f"{1000 * step_s:.1f} ms",
            "" if engine.steps_per_s is None else f"{_rate(engine.steps_per_s)} / s",
            f"batch of {_plural(engine.status.last_batch_size, 'request')}",
            _plural(engine.status.last_batch_tokens, "token"),
            f"{engine.status.num_in_flight_steps} in flight",
        ]
        yield _fitted(Text.assemble(_label("iteration"), "  " + " · ".join(part for part in parts if part)), width)

    def _lanes(self, now_ns: int, width: int) -> Iterable[Text]:
        num_cells = max(8, width - _LABEL_WIDTH - _NUMBER_WIDTH - 1)
        span_s = self._span_s(num_cells)
        cell_ns = round(span_s * 1e9 / num_cells)
        # Cells stand still in time: what has been drawn moves by whole cells only.
        right_ns = now_ns - now_ns % cell_ns
        lanes = self._history.lanes
        for stage, lane in lanes.items():
            cells = _cells(lane, right_ns, cell_ns, num_cells)
            busy = sum(cell.busy for cell in cells) / num_cells
            yield Text.assemble(
                _label(f"stage {stage}"), *(cell.drawn() for cell in cells), f"{busy:>{_NUMBER_WIDTH}.0%}"
            )
        if lanes:
            sizes = _batch_sizes(next(iter(lanes.values())), right_ns, cell_ns, num_cells)
            most = max((size for size in sizes if size), default=0)
            line = "".join(_LEVELS[-(-8 * size // most) if most else 0] for size in sizes)
            yield Text.assemble(_label("batch"), (line, "dim"), (f"{'≤ ' + str(most):>{_NUMBER_WIDTH}}", "dim"))
        yield _axis(span_s, num_cells)

    def _span_s(self, num_cells: int) -> float:
        """Time that the lanes show: an iteration has about a cell."""
        wanted_s = (self._history.step_s() or 0.02) * num_cells
        return max((span for span in _SPANS_S if span <= wanted_s), default=_SPANS_S[0])


def _axis(span_s: float, num_cells: int) -> Text:
    """Return what stands below the lanes: when they begin and end, and what their colours mean."""
    legend = Text.assemble(("█", _DECODE), (" decode  ", "dim"), ("█", _PREFILL), (" prefill", "dim"))
    begin, end = f"-{span_s:g} s", "now"
    gap = max(2, num_cells - len(begin) - len(end) - legend.cell_len)
    return Text.assemble(_label(""), (begin, "dim"), " " * (gap // 2), legend, " " * (gap - gap // 2), (end, "dim"))


class _Cell:
    """A slice of a lane."""

    __slots__ = ("busy", "decode", "prefill")

    def __init__(self) -> None:
        self.busy = 0.0
        """Part of the slice in which something was computed."""
        self.decode = 0.0
        self.prefill = 0.0
        """Tokens, in proportion to the part of their iteration that is in the slice."""

    def drawn(self) -> tuple[str, str]:
        """Return a character and its style: as high as the slice was busy, coloured by the make-up of the batch."""
        level = min(8, round(8 * self.busy))
        if not level:
            return ("▁", "bright_black") if self.busy == 0 else ("▁", _DECODE)
        share = self.decode / (self.decode + self.prefill)
        if level == 8 and 0 < share < 1:
            return _LEVELS[min(7, max(1, round(8 * share)))], f"{_DECODE} on {_PREFILL}"
        return _LEVELS[level], _DECODE if share > 0.5 else _PREFILL


def _cells(lane: Iterable[StepTiming], right_ns: int, cell_ns: int, num_cells: int) -> list[_Cell]:
    cells = [_Cell() for _ in range(num_cells)]
    left_ns = right_ns - num_cells * cell_ns
    for step in lane:
        begin_ns, end_ns = max(step.started_ns, left_ns), min(step.ended_ns, right_ns)
        if begin_ns >= end_ns:
            continue
        duration_ns = step.ended_ns - step.started_ns
        for at in range((begin_ns - left_ns) // cell_ns, (end_ns - 1 - left_ns) // cell_ns + 1):
            cell_left_ns = left_ns + at * cell_ns
            inside_ns = min(end_ns, cell_left_ns + cell_ns) - max(begin_ns, cell_left_ns)
            cells[at].busy += inside_ns / cell_ns
            cells[at].decode += step.num_decode_tokens * inside_ns / duration_ns
            cells[at].prefill += (step.num_tokens - step.num_decode_tokens) * inside_ns / duration_ns
    return cells


def _batch_sizes(lane: Iterable[StepTiming], right_ns: int, cell_ns: int, num_cells: int) -> list[int]:
    """Largest batch of each slice, in requests."""
    sizes = [0] * num_cells
    left_ns = right_ns - num_cells * cell_ns
    for step in lane:
        first, last = (step.started_ns - left_ns) // cell_ns, (step.ended_ns - 1 - left_ns) // cell_ns
        for at in range(max(0, first), min(num_cells - 1, last) + 1):
            sizes[at] = max(sizes[at], step.num_sequences)
    return sizes


def _cache(status: EngineStatus, width: int) -> Text:
    if (info := status.info) is None:
        return Text.assemble(_label("K/V"), ("none yet", "dim"))
    used, cached = status.num_used_slots, status.num_cached_slots
    free = max(0, info.num_slots - used - cached)
    words = f"  {used:,} used · {cached:,} cached · {free:,} free of {info.num_slots:,} tokens"
    num_cells = max(8, min(40, width - _LABEL_WIDTH - len(words)))
    used_cells = _num_cells(used, info.num_slots, num_cells)
    cached_cells = min(num_cells - used_cells, _num_cells(cached, info.num_slots, num_cells))
    bar = (
        ("█" * used_cells, _USED),
        ("▒" * cached_cells, _CACHED),
        ("░" * (num_cells - used_cells - cached_cells), _FREE),
    )
    return _fitted(Text.assemble(_label("K/V"), *bar, words), width)


def _num_cells(part: int, whole: int, num_cells: int) -> int:
    """Cells of a bar: at least one for whatever is there."""
    return max(1, round(num_cells * part / whole)) if part else 0


def _queue(snapshot: MeshSnapshot) -> Text:
    status = snapshot.engine.status
    preempted = f" ({status.num_preempted:,} preempted)" if status.num_preempted else ""
    return Text.assemble(
        _label("requests"),
        f"{status.num_running:,} running · {status.num_waiting:,} waiting{preempted} · "
        f"{status.num_finished:,} finished · {snapshot.num_gateway_requests:,} at this gateway",
    )


def _workers(status: EngineStatus) -> Table:
    table = Table.grid(padding=(0, 2))
    for worker in status.workers:
        style = _STATE_STYLES.get(worker.state, "yellow")
        said = f"{worker.state}: {worker.detail}" if worker.detail else worker.state
        name = f"stage {worker.stage} · rank {worker.tp_rank}"
        table.add_row(Text.assemble(("● ", style), name), Text(said, style), Text(worker.address, "dim"))
    return table


def _line(values: Sequence[float], width: int) -> str:
    """The latest values as columns, the highest of them as high as a line is."""
    shown = list(values)[-width:] if width else []
    most = max(shown, default=0.0)
    columns = (_LEVELS[max(1, round(8 * value / most))] if value > 0 else "▁" for value in shown)
    return "".join(columns).rjust(width)


def _label(name: str) -> tuple[str, str]:
    return f"{name:<{_LABEL_WIDTH}}", "bold"


def _rate(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if 0 < value < 10 else f"{value:,.0f}"


def _plural(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _fitted(text: Text, width: int) -> Text:
    text.truncate(width, overflow="ellipsis")
    return text
