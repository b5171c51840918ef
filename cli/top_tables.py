"""The tables of ``zrpc top``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zrpc.services.inspection.rates import WorkerRates

__all__ = ["SORT_KEYS", "mesh_table", "sorted_workers", "worker_screen"]

_UNKNOWN = "-"
_KIBI = 1024.0
_STATE_STYLES = {"running": "green", "lost": "red", "no answer": "red", "stuck": "yellow"}


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
    show: Callable[[WorkerRates], str]
    value: Callable[[WorkerRates], float | int | str | None]


_COLUMNS = {
    "rank": _Column("rank", lambda w: str(w.rank), lambda w: w.rank),
    "name": _Column("worker", lambda w: w.name, lambda w: w.name),
    "in": _Column("calls in/s", lambda w: _rate(w.calls_in), lambda w: w.calls_in),
    "out": _Column("calls out/s", lambda w: _rate(w.calls_out), lambda w: w.calls_out),
    "p50": _Column("p50", lambda w: _ms(w.p50_ms), lambda w: w.p50_ms),
    "p99": _Column("p99", lambda w: _ms(w.p99_ms), lambda w: w.p99_ms),
    "queue": _Column("queue", lambda w: _count(w.queued), lambda w: w.queued),
    "handlers": _Column("handlers", lambda w: _count(w.handlers), lambda w: w.handlers),
    "bytes-in": _Column("bytes in/s", lambda w: _bytes(w.bytes_in), lambda w: w.bytes_in),
    "bytes-out": _Column("bytes out/s", lambda w: _bytes(w.bytes_out), lambda w: w.bytes_out),
    "cpu": _Column("CPU", lambda w: _percent(w.cpu), lambda w: w.cpu),
    "memory": _Column("memory", lambda w: _bytes(w.memory), lambda w: w.memory),
    "rrefs": _Column("RRefs", lambda w: _count(w.rrefs), lambda w: w.rrefs),
    "state": _Column("state", lambda w: w.state, lambda w: w.state),
}
# By what the workers can be sorted.
SORT_KEYS = tuple(_COLUMNS)
_ASCENDING = ("rank", "name", "state")


def sorted_workers(workers: Sequence[WorkerRates], key: str) -> list[WorkerRates]:
    """Returns the workers sorted by a key: numbers from the largest on, unknown ones last."""
    value = _COLUMNS[key].value
    known = [worker for worker in workers if value(worker) is not None]
    known.sort(key=lambda worker: value(worker) or 0, reverse=key not in _ASCENDING)
    return known + [worker for worker in workers if value(worker) is None]


def mesh_table(
    title: str, workers: Sequence[WorkerRates], key: str, chosen: WorkerRates | None = None
) -> Table:
    """Returns the table of a mesh; the workers are sorted already."""
    table = Table(title=title, title_justify="left", title_style="bold", expand=True)
    for name, column in _COLUMNS.items():
        heading = Text(column.heading, style="reverse" if name == key else "")
        table.add_column(heading, justify="left" if name in ("name", "state") else "right")
    for worker in workers:
        cells = [Text(column.show(worker)) for column in _COLUMNS.values()]
        cells[-1].stylize(_STATE_STYLES.get(worker.state, "yellow"))
        table.add_row(*cells, style="reverse" if worker is chosen else None)
    return table


def worker_screen(worker: WorkerRates, rows: int) -> RenderableType:
    """Returns the screen for one worker, with at most ``rows`` functions and peers each."""
    where = f", pid {worker.pid} on {worker.host}" if worker.pid else ""
    heading = Text(f"{worker.name} (rank {worker.rank}){where}: {worker.state}", style="bold")
    if worker.why:
        return Group(heading, Text(worker.why))
    functions = Table(title="Busiest functions", title_justify="left", expand=True)
    functions.add_column("function")
    for name in ("runs/s", "busy", "run", "queued", "calls/s", "p50", "p99", "errors/s"):
        functions.add_column(name, justify="right")
    for each in worker.functions[:rows]:
        functions.add_row(
            Text(each.name),
            _rate(each.runs),
            _percent(each.busy),
            _ms(each.run_ms),
            _ms(each.queue_ms),
            _rate(each.calls),
            _ms(each.p50_ms),
            _ms(each.p99_ms),
            _rate(each.errors),
        )
    peers = Table(title="Busiest peers", title_justify="left", expand=True)
    peers.add_column("worker")
    for name in ("bytes in/s", "bytes out/s", "calls to it", "its calls", "room", "state"):
        peers.add_column(name, justify="right")
    for peer in worker.peers[:rows]:
        peers.add_row(
            Text(peer.name),
            _bytes(peer.bytes_in),
            _bytes(peer.bytes_out),
            str(peer.calls_in_flight),
            str(peer.requests_in_progress),
            _bytes(peer.room),
            peer.state,
        )
    return Group(heading, functions, peers)
