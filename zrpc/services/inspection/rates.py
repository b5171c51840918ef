"""What a worker does per second, from two snapshots with numbers. No I/O in here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from zrpc.calls.call_counters import quantile
from zrpc.services.inspection.discovery import MeshView
from zrpc.services.inspection.snapshot import Snapshot
from zrpc.wire.member_id import rank_of

# `Snapshot.stats`.
_Stats = Mapping[str, Any]


@dataclass
class FunctionRates:
    """One function: what this worker runs of it for others, and its own calls of it.

    Attributes:
        runs: executions per second.
        run_ms, queue_ms: how long one ran, and waited to run, on average; None if there was none.
        busy: seconds per second that all of them ran.
        calls: calls per second.
        p50_ms, p99_ms: within which time half of those calls, and 99 % of them, had an answer.
        errors: executions and calls that failed, per second.
    """

    name: str
    run_ms: float | None
    queue_ms: float | None
    p50_ms: float | None
    p99_ms: float | None
    runs: float
    busy: float
    calls: float
    errors: float


@dataclass
class PeerRates:
    """The traffic with one peer; bytes are per second and without shared memory."""

    name: str
    state: str
    bytes_out: float
    bytes_in: float
    calls_in_flight: int
    requests_in_progress: int
    room: int | None


@dataclass
class ActorLoad:
    """The actors of one class: their number, the calls that run and wait, and what runs."""

    name: str
    number: int
    running: int
    waiting: int
    calls: str


@dataclass
class WorkerRates:
    """One worker between two snapshots; what is None is not known.

    Attributes:
        state: ``running``, ``serving`` (it has called `shutdown`, and serves until the others do),
            ``leaving`` (all have), ``stuck`` (a call has waited for
            the option ``warn_after``), ``at a breakpoint``, ``lost``, or ``no answer``.
        why: for the last two, the reason.
        calls_in, calls_out: executions for others, and own calls that had an outcome, per second.
        p50_ms, p99_ms: of the own calls.
        queued, handlers: calls that wait for a thread, and handlers that run or wait.
        bytes_in, bytes_out: per second, by all ways.
        cpu: processor time per second: 1.0 is one processor.
        memory: resident bytes.
        rrefs: values owned, and references held to values of others.
    """

    name: str
    rank: int
    pid: int | None = None
    host: str = ""
    state: str = "running"
    why: str = ""
    calls_in: float | None = None
    calls_out: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    queued: int | None = None
    handlers: int | None = None
    bytes_in: float | None = None
    bytes_out: float | None = None
    cpu: float | None = None
    memory: int | None = None
    rrefs: int | None = None
    functions: list[FunctionRates] = field(default_factory=list)
    peers: list[PeerRates] = field(default_factory=list)
    actors: list[ActorLoad] = field(default_factory=list)


def mesh_rates(before: Iterable[Snapshot], now: MeshView) -> list[WorkerRates]:
    """Returns the rates of all workers of a mesh, by rank; not of those with a successor.

    Args:
        before: earlier snapshots. A worker that has none, or was restarted since, has no rates.
        now: the mesh as it is.
    """
    lost = {m.member for each in now.snapshots.values() for m in each.members if m.lost}
    # Members of two meshes may have equal ids, but no two workers a directory.
    earlier = {(each.host, each.directory): each.stats for each in before}
    found = [
        _worker(earlier.get((each.host, each.directory)), each) for each in now.snapshots.values()
    ]
    answered = {worker.rank for worker in found}
    for member, why in now.silent.items():
        state = "lost" if member in lost else "no answer"
        if state == "lost" and rank_of(member) in answered:
            continue  # it was restarted
        pid = now.pids.get(member) or None
        found.append(WorkerRates(now.names[member], rank_of(member), pid, state=state, why=why))
    return sorted(found, key=lambda worker: worker.rank)


def _worker(old: _Stats | None, now: Snapshot) -> WorkerRates:
    new = now.stats or {}
    rates = WorkerRates(now.name, rank_of(now.member), now.pid, now.host)
    if not new:
        return rates
    threads = new["threads"]
    rates.state = new["state"]
    rates.queued, rates.handlers = threads["queued"], threads["running"] + threads["waiting"]
    rates.memory, rates.rrefs = new["memory_bytes"], new["rrefs_owned"] + new["rrefs_held"]
    rates.actors = _actors(new)
    seconds = new["seconds"] - old["seconds"] if old else 0.0
    if not old or seconds <= 0:
        return rates
    rates.cpu = (new["cpu_seconds"] - old["cpu_seconds"]) / seconds
    rates.bytes_out = _sum(old, new, "traffic", "bytes_sent") / seconds
    rates.bytes_in = _sum(old, new, "traffic", "bytes_received") / seconds
    rates.calls_in = _sum(old, new, "handlers", "number") / seconds
    rates.calls_out = _sum(old, new, "calls", "number") / seconds
    histograms = [_histogram(old, new, name) for name in new["calls"]]
    totals = [sum(column) for column in zip(*histograms, strict=True)]
    rates.p50_ms, rates.p99_ms = _quantiles(totals)
    rates.functions = _functions(old, new, seconds)
    rates.peers = _peers(old, new, seconds)
    return rates


def _functions(old: _Stats, new: _Stats, seconds: float) -> list[FunctionRates]:
    """Returns the functions that did anything, the busiest first."""
    more = partial(_more, old, new)
    found = []
    for name in sorted({*new["handlers"], *new["calls"]}):
        runs, calls = more("handlers", name, "number"), more("calls", name, "number")
        run, queue = more("handlers", name, "run_seconds"), more("handlers", name, "queue_seconds")
        errors = more("handlers", name, "errors") + more("calls", name, "errors")
        run_ms, queue_ms = (run / runs * 1e3, queue / runs * 1e3) if runs else (None, None)
        p50, p99 = _quantiles(_histogram(old, new, name))
        per_second = [count / seconds for count in (runs, run, calls, errors)]
        if runs or calls:
            found.append(FunctionRates(name, run_ms, queue_ms, p50, p99, *per_second))
    return sorted(found, key=lambda each: (-each.busy, -each.calls))


def _peers(old: _Stats, new: _Stats, seconds: float) -> list[PeerRates]:
    """Returns the peers, those with the most traffic first."""
    found = [
        PeerRates(
            name,
            peer["state"],
            _more(old, new, "peers", name, "bytes_sent") / seconds,
            _more(old, new, "peers", name, "bytes_received") / seconds,
            peer["calls_in_flight"],
            peer["requests_in_progress"],
            peer["room"],
        )
        for name, peer in new["peers"].items()
    ]
    return sorted(found, key=lambda each: -(each.bytes_in + each.bytes_out))


def _actors(new: _Stats) -> list[ActorLoad]:
    """Returns the actors by class, those for which the most calls wait first."""
    found = [
        ActorLoad(name, each["number"], each["running"], each["waiting"], ", ".join(each["calls"]))
        for name, each in new["actors"].items()
    ]
    return sorted(found, key=lambda each: (-each.waiting, -each.running, each.name))


def _more(old: _Stats, new: _Stats, table: str, row: str, column: str) -> float:
    """Returns by how much a count has grown; a row that is new, or began again, by all of it."""
    count = float(new[table].get(row, {}).get(column, 0))
    earlier = float(old[table].get(row, {}).get(column, 0))
    return count - earlier if count >= earlier else count


def _sum(old: _Stats, new: _Stats, table: str, column: str) -> float:
    return sum(_more(old, new, table, row, column) for row in new[table])


def _histogram(old: _Stats, new: _Stats, name: str) -> list[int]:
    counts = new["calls"].get(name, {}).get("histogram", [])
    earlier = old["calls"].get(name, {}).get("histogram") or [0] * len(counts)
    return [count - first for count, first in zip(counts, earlier, strict=True)]


def _quantiles(histogram: list[int]) -> tuple[float | None, float | None]:
    if not sum(histogram):
        return None, None
    return quantile(histogram, 0.5) * 1000, quantile(histogram, 0.99) * 1000
