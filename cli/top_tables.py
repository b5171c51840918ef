"""The tables of ``zrpc top``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from zrpc.services.inspection.rates import WorkerRates

_KIBI = 1024.0
_STATE_STYLES = {
    "running": "green",
    "serving": "green",
    "lost": "red",
    "no answer": "red",
    "stuck": "yellow",
}


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _ms(value: float) -> str:
    return f"{value:.3g} ms" if value < 1000 else f"{value:,.0f} ms"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < _KIBI or unit == "GiB":
            break
        value /= _KIBI
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"


def _percent(value: float) -> str:
    return f"{value * 100:.0f} %"


class _Column(NamedTuple):
    heading: str
    attribute: str  # of a `WorkerRates`, a `FunctionRates`, a `PeerRates` or an `ActorLoad`
    show: Callable[[Any], str] = str
    left: bool = False

    def cell(self, row: object) -> Text:
        value = getattr(row, self.attribute)
        return Text("-" if value is None else self.show(value))


_COLUMNS = {
    "rank": _Column("rank", "rank"),
    "name": _Column("worker", "name", left=True),
    "in": _Column("calls in/s", "calls_in", _rate),
    "out": _Column("calls out/s", "calls_out", _rate),
    "p50": _Column("p50", "p50_ms", _ms),
    "p99": _Column("p99", "p99_ms", _ms),
    "queue": _Column("queue", "queued"),
    "handlers": _Column("handlers", "handlers"),
    "bytes-in": _Column("bytes in/s", "bytes_in", _bytes),
    "bytes-out": _Column("bytes out/s", "bytes_out", _bytes),
    "cpu": _Column("CPU", "cpu", _percent),
    "memory": _Column("memory", "memory", _bytes),
    "rrefs": _Column("RRefs", "rrefs"),
    "state": _Column("state", "state", left=True),
}
_WIDEST = 10_000
# What is left out if the terminal is too narrow for all, the first one first.
_LEFT_OUT = (
    *("rrefs", "bytes-in", "bytes-out", "handlers", "p50", "rank"),
    *("queue", "memory", "out", "cpu", "p99"),
)
_FUNCTION_COLUMNS = (
    _Column("function", "name", left=True),
    _Column("runs/s", "runs", _rate),
    _Column("busy", "busy", _percent),
    _Column("run", "run_ms", _ms),
    _Column("queued", "queue_ms", _ms),
    _Column("calls/s", "calls", _rate),
    _Column("p50", "p50_ms", _ms),
    _Column("p99", "p99_ms", _ms),
    _Column("errors/s", "errors", _rate),
)
_PEER_COLUMNS = (
    _Column("worker", "name", left=True),
    _Column("bytes in/s", "bytes_in", _bytes),
    _Column("bytes out/s", "bytes_out", _bytes),
    _Column("calls to it", "calls_in_flight"),
    _Column("its calls", "requests_in_progress"),
    _Column("room", "room", _bytes),
    _Column("state", "state"),
)
_FUNCTIONS_LEFT_OUT = ("queue_ms", "p50_ms", "busy", "errors", "runs")
_PEERS_LEFT_OUT = ("room", "requests_in_progress", "calls_in_flight")
_ACTOR_COLUMNS = (
    _Column("actor", "name", left=True),
    _Column("number", "number"),
    _Column("calls that run", "running"),
    _Column("calls that wait", "waiting"),
    _Column("running now", "calls"),
)
# By what the workers can be sorted.
SORT_KEYS = tuple(_COLUMNS)
_ASCENDING = ("rank", "name", "state")


def sorted_workers(workers: Sequence[WorkerRates], key: str) -> list[WorkerRates]:
    """Returns the workers sorted by a key: numbers from the largest on, unknown ones last."""

    def value(worker: WorkerRates) -> Any:
        return getattr(worker, _COLUMNS[key].attribute)

    known = [worker for worker in workers if value(worker) is not None]
    known.sort(key=value, reverse=key not in _ASCENDING)
    return known + [worker for worker in workers if value(worker) is None]


def mesh_table(
    title: str,
    workers: Sequence[WorkerRates],
    key: str,
    console: Console,
    chosen: WorkerRates | None = None,
) -> Table:
    """Returns the table of a mesh, with as many columns as fit.

    Args:
        title: above it.
        workers: its rows, sorted already.
        key: by what they are sorted; that column is always there.
        console: where it will be shown.
        chosen: the row to mark.
    """
    columns = list(_COLUMNS.values())
    left_out = [_COLUMNS[name].attribute for name in _LEFT_OUT if name != key]
    sorted_by = _COLUMNS[key].attribute
    return _fitting(title, columns, left_out, workers, console, sorted_by, chosen)


def _fitting(
    title: str,
    columns: Sequence[_Column],
    left_out: Sequence[str],
    rows: Sequence[object],
    console: Console,
    sorted_by: str = "",
    chosen: WorkerRates | None = None,
) -> Table:
    """Returns the widest table that fits, without the columns for some attributes if need be.

    Args:
        title: above it.
        columns: all its columns.
        left_out: what the columns that can be left out show, that of the first one first.
        rows: what it shows.
        console: where it will be shown.
        sorted_by: what the column shows that the rows are sorted by.
        chosen: the row to mark.
    """
    unbounded = console.options.update_width(_WIDEST)
    for count in range(len(left_out) + 1):
        table = Table(box=box.SIMPLE_HEAD if count else box.HEAVY_HEAD)
        kept = [column for column in columns if column.attribute not in left_out[:count]]
        for column in kept:
            style = "reverse" if column.attribute == sorted_by else ""
            table.add_column(
                Text(column.heading, style=style), justify="left" if column.left else "right"
            )
        for row in rows:
            cells = [column.cell(row) for column in kept]
            if isinstance(row, WorkerRates):
                cells[-1].stylize(_STATE_STYLES.get(row.state, "yellow"))
            table.add_row(*cells, style="reverse" if row is chosen else None)
        if Measurement.get(console, unbounded, table).maximum <= console.width:
            break
    table.title, table.expand = title, True  # not before: these are as wide as they can be
    table.title_justify, table.title_style = "left", "bold"
    return table


def worker_screen(worker: WorkerRates, rows: int, console: Console) -> RenderableType:
    """Returns the screen for one worker, with at most ``rows`` rows in each table."""
    where = f", pid {worker.pid} on {worker.host}" if worker.pid else ""
    heading = Text(f"{worker.name} (rank {worker.rank}){where}: {worker.state}", style="bold")
    if worker.why:
        return Group(heading, Text(worker.why))

    def table(
        title: str, columns: Sequence[_Column], left_out: Sequence[str], found: Sequence[object]
    ) -> Table:
        return _fitting(title, columns, left_out, found[:rows], console)

    tables = [
        table("Busiest functions", _FUNCTION_COLUMNS, _FUNCTIONS_LEFT_OUT, worker.functions),
        table("Busiest peers", _PEER_COLUMNS, _PEERS_LEFT_OUT, worker.peers),
    ]
    if worker.actors:
        tables.insert(1, table("Busiest actors", _ACTOR_COLUMNS, (), worker.actors))
    return Group(heading, *tables)
