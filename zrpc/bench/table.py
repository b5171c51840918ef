"""The results of a run, as a table for people and as data for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from zrpc.bench.machine import Machine
from zrpc.bench.result import RowResult
from zrpc.bench.row import Row, Unit
from zrpc.bench.run import Run, Settings
from zrpc.bench.session import LIMIT, Sample

# The full reason is shown below the table.
_MAX_REASON_CHARS = 20
_SCALES: dict[Unit, tuple[tuple[float, str], ...]] = {
    Unit.SECONDS: ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    Unit.RATE: ((1e6, "M/s"), (1e3, "k/s"), (1.0, "/s")),
    Unit.BYTES: ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")),
    Unit.COUNT: ((1.0, ""),),
}


def quantity(value: float, unit: Unit) -> str:
    """Formats a number with three digits and its unit."""
    scales = _SCALES[unit]
    size, name = next((each for each in scales if abs(value) >= each[0]), scales[-1])
    return f"{_digits(value / size)} {name}".rstrip()


def _digits(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def headline(machine: Machine, settings: Settings) -> str:
    """Describes the machine and the run in a few lines."""
    transport = "loopback tcp" if settings.tcp else "each library's default transport"
    rounds = "1 round" if settings.rounds == 1 else f"{settings.rounds} rounds"
    lines = f"{machine}\n{rounds} of fresh processes in turn, over {transport}"
    if not settings.device:
        return lines
    from zrpc.bench.device import name_of_device  # it imports torch

    return f"{lines}, tensors on {name_of_device(settings.device)}"


def as_text(run: Run) -> str:
    """Returns the table, and below it the failures with their reasons."""
    lines = [_cells(result, run.settings) for result in run.results]
    return align_columns([list(lines[0]), *(line.values() for line in lines)]) + _footnotes(run)


def _cells(result: RowResult, settings: Settings) -> dict[str, str]:
    """Returns the cells of a row, by column."""
    against = settings.against
    cells = {"row": result.row.name}
    if against:
        cells[against] = _cell(result, against)
    cells["zrpc"] = _cell(result, "zrpc") + _bound(result.row)
    if against:
        spread = result.times_faster(against)
        cells["times faster"] = f"{spread.median:.2f}" if spread else "-"
        cells["min to max"] = f"{spread.low:.2f} to {spread.high:.2f}" if spread else ""
    cells["limit"] = _limit(result, settings)
    cells["times limit"] = _times_limit(result)
    return cells


def _limit(result: RowResult, settings: Settings) -> str:
    limit, spread = result.row.limit_of(settings.tcp, settings.device), result.spread(LIMIT)
    if limit is None or spread is None:
        return "failed" if result.failures(LIMIT) else ""
    return f"{quantity(spread.median, result.row.unit)} {limit.name}"


def _times_limit(result: RowResult) -> str:
    """Returns how many times the limit zrpc takes, if that can be said."""
    spread = None if result.row.above_limit else result.times_faster("zrpc", than=LIMIT)
    return f"{spread.median:.2f}" if spread else ""


def _cell(result: RowResult, participant: str) -> str:
    spread = result.spread(participant)
    failures = result.failures(participant)
    if spread is None:
        return f"failed: {_short(failures[0].reason)}" if failures else "-"
    more = "".join(f", {value:.0f} {name}" for name, value in result.more(participant).items())
    return quantity(spread.median, result.row.unit) + more + ("*" if failures else "")


def _bound(row: Row) -> str:
    if row.bound is None:
        return ""
    return f" (at {'least' if row.unit.more_is_better else 'most'} {quantity(row.bound, row.unit)})"


def _short(reason: str) -> str:
    return reason if len(reason) <= _MAX_REASON_CHARS else reason[: _MAX_REASON_CHARS - 1] + "…"


def _footnotes(run: Run) -> str:
    lines = []
    for result in run.results:
        for participant, outcomes in result.outcomes.items():
            if failures := result.failures(participant):
                reasons = list(dict.fromkeys(failure.reason for failure in failures))
                lines.append(
                    f"* {result.row.name}: {participant} failed in {len(failures)} of "
                    f"{len(outcomes)} rounds: {'; '.join(reasons)}"
                )
    lines += [f"* {note}" for note in run.notes]
    return "".join(f"\n{line}" for line in ["", *lines]) if lines else ""


def align_columns(lines: Sequence[Iterable[str]]) -> str:
    """Aligns rows of cells: the first column to the left, the others to the right."""
    names, *columns = zip(*lines, strict=True)
    aligned = [_padded(names, str.ljust), *(_padded(column, str.rjust) for column in columns)]
    head, *text = ("  ".join(cells).rstrip() for cells in zip(*aligned, strict=True))
    rule = "  ".join("-" * len(column[0]) for column in aligned)
    return "\n".join([head, rule, *text])


def _padded(cells: Sequence[str], pad: Callable[[str, int], str]) -> list[str]:
    return [pad(cell, max(map(len, cells))) for cell in cells]


def as_data(run: Run, machine: Machine, load: tuple[float, float]) -> dict[str, Any]:
    """Returns all results, for ``--json``.

    Args:
        run: the run.
        machine: the machine it ran on.
        load: the load average before and after the run.
    """
    settings = run.settings
    return {
        "machine": asdict(machine),
        "load_average": {"before": load[0], "after": load[1]},
        "settings": asdict(settings),
        "rows": [_row_data(result, settings) for result in run.results],
        "notes": run.notes,
    }


def _row_data(result: RowResult, settings: Settings) -> dict[str, Any]:
    limit = result.row.limit_of(settings.tcp, settings.device)
    faster = result.times_faster(settings.against) if settings.against else None
    times_limit = result.times_faster("zrpc", than=LIMIT)
    return {
        "row": result.row.name,
        "unit": result.row.unit.value,
        "limit": limit.name if limit else None,
        "bound": result.row.bound,
        "rounds": {
            participant: [
                asdict(each) if isinstance(each, Sample) else {"failed": each.reason}
                for each in outcomes
            ]
            for participant, outcomes in result.outcomes.items()
        },
        "median": {
            participant: spread.median
            for participant in result.outcomes
            if (spread := result.spread(participant)) is not None
        },
        "times_faster": asdict(faster) if faster else None,
        "times_limit": asdict(times_limit) if times_limit else None,
    }
