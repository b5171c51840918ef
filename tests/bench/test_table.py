"""Tests of the table, the JSON data and the chart of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zrpc.bench.machine import Machine
from zrpc.bench.plot import plot
from zrpc.bench.result import Failure
from zrpc.bench.row import Group, Limit, Row, Unit
from zrpc.bench.run import Run
from zrpc.bench.sampling import Sample, Settings
from zrpc.bench.table import as_data, as_text, headline, quantity

MACHINE = Machine("a processor", 2, 8 * 2**30, "Linux 6", {"torch": "2.13", "libzmq": "4.3"})


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
    run.results[1].outcomes["torch"] = [Failure("no result within 60 s", final=True)] * 2
    return run


def test_quantities_have_three_digits() -> None:
    for value, unit, text in (
        (0.0000934, Unit.SECONDS, "93.4 µs"),
        (0.00934, Unit.SECONDS, "9.34 ms"),
        (12.0, Unit.SECONDS, "12.0 s"),
        (3e-8, Unit.SECONDS, "0.03 µs"),
        (19_600.0, Unit.RATE, "19.6 k/s"),
        (999.9, Unit.RATE, "1000 /s"),
        (251 * 2**20, Unit.BYTES, "251 MiB"),
        (9.02, Unit.COUNT, "9.02"),
    ):
        assert quantity(value, unit) == text


def test_the_table() -> None:
    lines = as_text(a_run()).splitlines()
    assert " ".join(lines[0].split()) == "row torch zrpc times faster min to max limit times limit"
    assert " ".join(lines[2].split()) == "call 420 µs 105 µs 4.00 4.00 to 4.00 50.0 µs ZeroMQ 2.00"
    assert lines[3].startswith("per second  failed: no result within 60…  105 /s")
    assert lines[-1] == ("* per second: torch failed in 2 of 2 rounds: no result within 60 s")


def test_the_table_without_another_library() -> None:
    run = a_run(None)
    run.results[1].outcomes.pop("torch")
    lines = as_text(run).splitlines()
    assert lines[0].split() == ["row", "zrpc", "limit", "times", "limit"]
    assert len(lines) == 4


def test_a_row_that_was_not_measured_is_empty() -> None:
    run = Run([Group("group", (Row("call", "m:f"),))], Settings())
    assert as_text(run).splitlines()[-1].split() == ["call", "-", "-", "-"]


def test_other_counts_of_a_row_are_shown() -> None:
    run = Run([Group("group", (Row("steps", "m:f", unit=Unit.COUNT),))], Settings(against=None))
    run.results[0].add("zrpc", Sample(92.0, 92.0, 200, {"modules": 31.0, "lines": 450.0}))
    assert as_text(run).splitlines()[-1] == "steps  92.0, 31 modules, 450 lines"


def test_what_a_row_should_measure_is_shown_beside_it() -> None:
    rows = (
        Row("ratio", "m:f", unit=Unit.COUNT, bound=1.15),
        Row("rate", "m:f", unit=Unit.RATE, bound=200_000),
    )
    run = Run([Group("group", rows)], Settings(against=None))
    for result, value in zip(run.results, (1.07, 250_000.0), strict=True):
        result.add("zrpc", Sample(value, value, 1))
    lines = as_text(run).splitlines()
    assert lines[-2].split(maxsplit=1)[1] == "1.07 (at most 1.15)"
    assert lines[-1].split(maxsplit=1)[1] == "250 k/s (at least 200 k/s)"
    assert [row["bound"] for row in as_data(run, MACHINE, (0.5, 1.5))["rows"]] == [1.15, 200_000]


def test_failures_in_some_rounds_are_marked() -> None:
    run = a_run()
    run.results[0].add("zrpc", Failure("worker1 was killed by SIGSEGV"))
    run.notes.append("a note")
    text = as_text(run)
    assert "105 µs*" in text
    assert "* call: zrpc failed in 1 of 3 rounds: worker1 was killed by SIGSEGV" in text
    assert text.endswith("* a note")


def test_the_headline_describes_the_machine_and_the_run() -> None:
    text = headline(MACHINE, Settings(rounds=1, tcp=True))
    assert "2 cores of a processor, 8 GiB, Linux 6" in text
    assert "torch 2.13, libzmq 4.3" in text
    assert "1 round of fresh processes in turn, over loopback tcp" in text


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
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_run_with_failures_can_be_drawn(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"run.{ending}"
    plot(a_run(), "caption", path)
    assert path.stat().st_size > 1000
