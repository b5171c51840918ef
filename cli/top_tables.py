"""The tables of ``zrpc top``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from zrpc.services.inspection.rates import WorkerRates

_UNKNOWN = "-"
_KIBI = 1024.0
_STATE_STYLES = {
    "running": "green",
    "serving": "green",
    "lost": "red",
    "no answer": "red",
    "stuck": "yellow",
}


def _rate(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _ms(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.3g} ms" if value < 1000 else f"{value:,.0f} ms"


def _bytes(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < _KIBI or unit == "GiB":
            break
        value /= _KIBI
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"


def _percent(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value * 100:.0f} %"


def _count(value: int | None) -> str:
    return _UNKNOWN if value is None else str(value)


class _Column(NamedTuple):
    heading: str
    attribute: str  # of a `WorkerRates`, a `FunctionRates`, a `PeerRates` or an `ActorLoad`
    show: Callable[[Any], str] = str

    def cell(self, row: object) -> Text:
        return Text(self.show(getattr(row, self.attribute)))


_COLUMNS = {
    "rank": _Column("rank", "rank"),
    "name": _Column("worker", "name"),
    "in": _Column("calls in/s", "calls_in", _rate),
    "out": _Column("calls out/s", "calls_out", _rate),
    "p50": _Column("p50", "p50_ms", _ms),
    "p99": _Column("p99", "p99_ms", _ms),
    "queue": _Column("queue", "queued", _count),
    "handlers": _Column("handlers", "handlers", _count),
    "bytes-in": _Column("bytes in/s", "bytes_in", _bytes),
    "bytes-out": _Column("bytes out/s", "bytes_out", _bytes),
    "cpu": _Column("CPU", "cpu", _percent),
    "memory": _Column("memory", "memory", _bytes),
    "rrefs": _Column("RRefs", "rrefs", _count),
    "state": _Column("state", "state"),
}
_WIDEST = 10_000
# What is left out if the terminal is too narrow for all, the first one first.
_LEFT_OUT = (
    *("rrefs", "bytes-in", "bytes-out", "handlers", "p50", "rank"),
    *("queue", "memory", "out", "cpu", "p99"),
)
_FUNCTION_COLUMNS = (
    _Column("function", "name"),
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
    _Column("worker", "name"),
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
    _Column("actor", "name"),
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

    def build(without: Sequence[str], frame: box.Box) -> Table:
        columns = {name: column for name, column in _COLUMNS.items() if name not in without}
        return _mesh_table(columns, workers, key, chosen, frame)

    return _fitting(title, [name for name in _LEFT_OUT if name != key], console, build)


def _fitting(
    title: str,
    left_out: Sequence[str],
    console: Console,
    build: Callable[[Sequence[str], box.Box], Table],
) -> Table:
    """Returns the widest table that fits: ``build`` leaves out columns, the first ones first."""
    unbounded = console.options.update_width(_WIDEST)
    for count in range(len(left_out) + 1):
        table = build(left_out[:count], box.SIMPLE_HEAD if count else box.HEAVY_HEAD)
        if Measurement.get(console, unbounded, table).maximum <= console.width:
            break
    table.title, table.expand = title, True  # not before: these are as wide as they can be
    table.title_justify, table.title_style = "left", "bold"
    return table


def _mesh_table(
    columns: Mapping[str, _Column],
    workers: Sequence[WorkerRates],
    key: str,
    chosen: WorkerRates | None,
    frame: box.Box,
) -> Table:
    table = Table(box=frame)
    for name, column in columns.items():
        heading = Text(column.heading, style="reverse" if name == key else "")
        table.add_column(heading, justify="left" if name in ("name", "state") else "right")
    for worker in workers:
        cells = [column.cell(worker) for column in columns.values()]
        cells[-1].stylize(_STATE_STYLES.get(worker.state, "yellow"))
        table.add_row(*cells, style="reverse" if worker is chosen else None)
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
        def build(without: Sequence[str], frame: box.Box) -> Table:
            kept = [column for column in columns if column.attribute not in without]
            return _table(kept, found[:rows], frame)

        return _fitting(title, left_out, console, build)

    functions = ("Busiest functions", _FUNCTION_COLUMNS, _FUNCTIONS_LEFT_OUT, worker.functions)
    tables = [table(*functions)]
    if worker.actors:
        tables.append(table("Busiest actors", _ACTOR_COLUMNS, (), worker.actors))
    tables.append(table("Busiest peers", _PEER_COLUMNS, _PEERS_LEFT_OUT, worker.peers))
    return Group(heading, *tables)


def _table(columns: Sequence[_Column], rows: Sequence[object], frame: box.Box) -> Table:
    table = Table(box=frame)
    for number, column in enumerate(columns):
        table.add_column(column.heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    return table
