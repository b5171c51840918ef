"""What is computed of samples, and shown: ratios, tables and charts. Without processes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from zrpc.bench.link import SIZES, Speeds
from zrpc.bench.link import as_text as link_as_text
from zrpc.bench.machine import Machine
from zrpc.bench.plot import plot
from zrpc.bench.result import Failure, RowResult, Spread
from zrpc.bench.row import Group, Limit, Row, Unit
from zrpc.bench.run import Run, Settings
from zrpc.bench.scale import Point, compute
from zrpc.bench.session import Sample, Sampling
from zrpc.bench.table import as_data, as_text

MACHINE = Machine("a processor", 2, 8 * 2**30, "Linux 6", {"torch": "2.13", "libzmq": "4.3"})


def test_a_sample_has_the_median_and_the_worst_of_enough_repeats_after_one_warm_up() -> None:
    naps = iter([0.0, 0.0, 0.15, 0.0])
    sample = Sampling(seconds=0, min_repeats=3).time(lambda: time.sleep(next(naps)))
    assert sample.repeats == 3
    assert sample.value < 0.15 <= sample.worst
    assert Sampling(seconds=0.05, min_repeats=1).time(lambda: None).repeats > 100
    rate = Sampling(seconds=0, min_repeats=1).rate(lambda: time.sleep(0.01), 10)
    assert 100 < rate.value == rate.worst <= 1000


def test_samplings_are_scaled_and_divided_and_samples_merged() -> None:
    assert [Sampling(scale=0.02).scaled(number) for number in (1000, 8)] == [20, 1]
    sampling = Sampling(seconds=0.3, min_repeats=5, scale=0.5).divided(6)
    assert sampling == Sampling(seconds=pytest.approx(0.05), min_repeats=1, scale=0.5)
    turns = [Sample(1.0, 2.0, 1000), Sample(3.0, 9.0, 10), Sample(4.0, 5.0, 10)]
    assert Sample.merged(turns, more_is_better=False) == Sample(3.0, 9.0, 1020)
    assert Sample.merged(turns, more_is_better=True) == Sample(3.0, 2.0, 1020)


def result(unit: Unit, **rounds: list[float | None]) -> RowResult:
    """Returns the result of a row; None in ``rounds`` is a failure."""
    above = unit is Unit.BYTES
    made = RowResult(Row("row", "m:f", unit=unit, limit=Limit("l", "m:f"), above_limit=above))
    for participant, values in rounds.items():
        for value in values:
            made.add(participant, Failure("died") if value is None else Sample(value, value, 1))
    return made


def test_ratios_are_computed_within_each_round_in_which_neither_failed() -> None:
    for unit, torch, zrpc, expected in (
        (Unit.SECONDS, [4.0, 6.0, 3.0], [2.0, 2.0, 2.0], Spread(2.0, 1.5, 3.0)),
        (Unit.SECONDS, [1.0, 10.0, 100.0], [1.0, 1.0, 200.0], Spread(1.0, 0.5, 10.0)),
        (Unit.RATE, [10.0, 20.0], [40.0, 40.0], Spread(3.0, 2.0, 4.0)),
        (Unit.BYTES, [150.0], [110.0], Spread(5.0, 5.0, 5.0)),  # above the limit
        (Unit.BYTES, [150.0, 150.0], [100.0, 90.0], None),
        (Unit.SECONDS, [None, 4.0], [1.0, 2.0], Spread(2.0, 2.0, 2.0)),
        (Unit.SECONDS, [9.0, 4.0], [None, 2.0], Spread(2.0, 2.0, 2.0)),
        (Unit.SECONDS, [4.0, 4.0], [2.0], Spread(2.0, 2.0, 2.0)),  # interrupted in the second
        (Unit.SECONDS, [], [], None),
    ):
        found = result(unit, torch=torch, zrpc=zrpc, limit=[99.0, 100.0, 101.0])
        assert found.times_faster("torch") == expected


def a_run(against: str | None = "torch") -> Run:
    """Returns a run of two rows in two rounds; torch hung in one of the rows."""
    rows = (
        Row("call", "m:f", limit=Limit("ZeroMQ", "m:f")),
        Row("per second", "m:f", unit=Unit.RATE),
    )
    run = Run([Group("group", rows)], Settings(against=against, rounds=2))
    for result, factor in zip(run.results, (1e-6, 1.0), strict=True):
        for value in (100.0, 110.0):
            result.add("zrpc", Sample(value * factor, value * factor, 1))
            if against:
                result.add(against, Sample(4 * value * factor, 4 * value * factor, 1))
    run.results[0].add("limit", Sample(50e-6, 50e-6, 1))
    if against:
        run.results[1].outcomes["torch"] = [Failure("no result within 60 s", final=True)] * 2
    return run


def test_the_table_compares_with_another_library_and_marks_failures() -> None:
    run = a_run()
    lines = as_text(run).splitlines()
    assert " ".join(lines[0].split()) == "row torch zrpc times faster min to max limit times limit"
    assert " ".join(lines[2].split()) == "call 420 µs 105 µs 4.00 4.00 to 4.00 50.0 µs ZeroMQ 2.00"
    assert lines[3].startswith("per second  failed: no result within 60…  105 /s")
    assert lines[-1] == ("* per second: torch failed in 2 of 2 rounds: no result within 60 s")
    run.results[0].add("zrpc", Failure("worker1 was killed by SIGSEGV"))
    run.notes.append("a note")
    text = as_text(run)
    assert "105 µs*" in text
    assert "* call: zrpc failed in 1 of 3 rounds: worker1 was killed by SIGSEGV" in text
    assert text.endswith("* a note")
    lines = as_text(a_run(None)).splitlines()
    assert lines[0].split() == ["row", "zrpc", "limit", "times", "limit"]
    assert len(lines) == 4


def test_rows_show_other_counts_and_bounds_or_that_they_were_not_measured() -> None:
    rows = (
        Row("none", "m:f"),
        Row("steps", "m:f", unit=Unit.COUNT),
        Row("ratio", "m:f", unit=Unit.COUNT, bound=1.15),
        Row("rate", "m:f", unit=Unit.RATE, bound=200_000),
    )
    run = Run([Group("group", rows)], Settings(against=None))
    run.results[1].add("zrpc", Sample(92.0, 92.0, 200, {"modules": 31.0, "lines": 450.0}))
    for found, value in zip(run.results[2:], (1.07, 250_000.0), strict=True):
        found.add("zrpc", Sample(value, value, 1))
    assert [line.split(maxsplit=1)[1].strip() for line in as_text(run).splitlines()[-4:]] == [
        *("-", "92.0, 31 modules, 450 lines"),
        *("1.07 (at most 1.15)", "250 k/s (at least 200 k/s)"),
    ]


def test_the_data_is_json_and_contains_every_round() -> None:
    data = json.loads(json.dumps(as_data(a_run(), MACHINE, (0.5, 1.5))))
    call, rate = data["rows"]
    assert [each["value"] for each in call["rounds"]["zrpc"]] == pytest.approx([1e-4, 1.1e-4])
    assert call["times_faster"]["median"] == pytest.approx(4.0)
    assert call["times_limit"]["median"] == pytest.approx(2.0)
    assert call["limit"] == "ZeroMQ"
    assert rate["rounds"]["torch"] == [{"failed": "no result within 60 s"}] * 2
    assert rate["times_faster"] is None
    assert data["machine"]["versions"]["torch"] == "2.13"
    assert data["settings"]["rounds"] == 2


@pytest.mark.system
def test_a_run_with_failures_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for ending in ("png", "svg"):
        path = tmp_path / f"run.{ending}"
        plot(a_run(), "caption", path)
        assert path.stat().st_size > 1000


def point(workers: int, failed: str | None = None, library: str = "zrpc") -> Point:
    values = dict.fromkeys(("call", "in turn", "push", "all-to-all"), 0.001)
    values |= {"init": 0.001 * workers**2, "descriptors": 20.0 + 5 * workers, "threads": 6.0}
    return Point(library, workers, {**values, "memory": 1e7 + 1e5 * workers}, failed)


def test_what_a_worker_uses_grows_by_the_same_amount_with_each_peer() -> None:
    (found,) = compute([point(2), point(8), point(64)], [1024])
    assert (found.library, found.workers, found.computed) == ("zrpc", 1024, True)
    expected = point(1024).values
    measured = ("init", "descriptors", "threads", "memory")
    assert found.values == {name: pytest.approx(expected[name]) for name in measured}
    # Nothing is computed from less than two meshes.
    assert compute([point(8), point(64, failed="hung")], [1024]) == []
    assert compute([point(8), point(64, library="torch")], [1024]) == []


def test_the_table_of_the_link_shows_medians_and_what_keys_cost() -> None:
    speeds = Speeds(raw=[2e9], failures=["torch: it hung", "torch: it hung"])
    for size in SIZES:
        speeds.tensors["zrpc", size] = [8e8, 4e8, 6e8]
        speeds.tensors["zrpc with keys", size] = [3e8]
    lines = link_as_text(speeds).splitlines()
    assert lines[2].split("  ")[0] == "1 MiB"
    for text in ("failed", "600 (400 to 800)", "300 (300 to 300)", "2.00 times"):
        assert text in lines[2]
    assert lines[-2:] == ["raw TCP (iperf3): 2000 (2000 to 2000) MB/s", "* torch: it hung"]
