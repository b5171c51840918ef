"""A soak test end to end: a short life, and what it tells of a wrong one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from zrpc.cli import main

from zrpc.soak import life as lives
from zrpc.soak import plan as plans
from zrpc.soak import run as runs
from zrpc.soak.life import live
from zrpc.soak.plan import Death, Life, plan
from zrpc.soak.record import Record

DEATHS = (Death(1, 0.1), Death(2, 0.1))
SHORT = Life("7.0", "frames", {"shared_memory": 0}, True, 1, 0.2, 1, DEATHS, (None,))


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "soak", *arguments])


def test_a_short_life() -> None:
    record, told = Record(seed=7, workers=3), []
    live(SHORT, 3, record, told.append)
    assert record.tally.violations == []
    assert record.counts == {
        "worker joined": 3,
        "worker killed": 2,
        "worker joined again": 1,
        "worker left": 2,
    }
    assert {"sync", "large", "optimize", "pass_on", "count_marks"} <= set(record.tally.done)
    assert all(record.tally.cut[f"a {what} under way"] == 4 for what in ("call", "method", "value"))
    assert len(record.told_in) == 4
    assert told[0] == "a mesh starts"
    assert told[-1] == "the mesh ends"
    assert "no violations, nothing left behind" in record.as_text()


def test_a_worker_that_ends_by_itself_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_all(self: Any, function: Any, *args: Any) -> Any:
        return lives._results({0: self._mesh.submit(0, exit_now)})

    monkeypatch.setattr(lives._Mesh, "_all", end_all)
    record = Record(seed=7, workers=3)
    live(SHORT, 3, record, lambda what: None)
    [text] = record.tally.violations
    assert "WorkerExited: worker0 (pid " in text
    assert "exited with status 3" in text
    assert "that was all" in record.outputs["worker0"]
    assert "1 violations; the seed is 7" in record.as_text()


def exit_now() -> None:
    import os

    print("that was all", flush=True)
    os._exit(3)


def test_all_of_a_plan_comes_from_the_seed() -> None:
    found = [plan(5, number, 6, 600.0) for number in range(6)]
    assert found == [plan(5, number, 6, 600.0) for number in range(6)]
    assert len({life.name for life in found}) == 6
    assert [life.way for life in found[:3]] == [way for way, _ in plans._WAYS]
    assert found != [plan(6, number, 6, 600.0) for number in range(6)]
    assert all(0 < death.after < life.seconds for life in found for death in life.deaths)
    # What is left decides how long a life may be, and that there is one.
    assert plan(5, 0, 6, 0.0).healthy == 1


def test_violations_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def go_wrong(life: Life, workers: int, record: Record, tell: Any) -> None:
        record.tally.violations.append(f"{life.name} went wrong with {workers}")

    monkeypatch.setattr(runs, "live", go_wrong)
    done = invoke("--seed", "11", "--workers", "4", "--json", str(tmp_path / "soak.json"))
    assert done.exit_code == 1, done.output
    assert "seed 11, 4 workers, 1 min" in done.output
    assert "violation: 11.0 went wrong with 4" in done.output
    assert "1 violations; the seed is 11" in done.output
    data = json.loads((tmp_path / "soak.json").read_text())
    assert data["seed"] == 11
    assert data["violations"] == ["11.0 went wrong with 4"]


def test_ctrl_c_tells_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(life: Life, workers: int, record: Record, tell: Any) -> None:
        record.tally.done["sync"] += 5
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "live", interrupt)
    done = invoke("--minutes", "1")
    assert done.exit_code == 130
    assert "5 actions in" in done.output
    assert done.output.endswith("interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--minutes", "0"], "0.0 is not in the range x>0"),
        (["--minutes", "nan"], "expected a finite number, but got nan"),
        (["--workers", "2"], "2 is not in the range x>=3"),
        (["--seed", "-1"], "-1 is not in the range x>=0"),
        (["--json", "/no/such/place/f.json"], "there is no directory /no/such/place for f.json"),
        (["--json", "/proc/f.json"], "/proc/f.json can't be written: "),
    ],
)
def test_bad_arguments(arguments: list[str], error: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert error in done.output
