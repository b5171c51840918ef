"""Tests of soak tests end to end: a short episode, and reports of violations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from zrpc.bench.soak import episode as episode_module
from zrpc.bench.soak import run as run_module
from zrpc.bench.soak import schedule as schedule_module
from zrpc.bench.soak.episode import run_episode
from zrpc.bench.soak.report import Report
from zrpc.bench.soak.schedule import Death, Episode, schedule_episode
from zrpc.cli import main

DEATHS = (Death(1, 0.1), Death(2, 0.1))
SHORT = Episode("7.0", "frames", {"shared_memory": 0}, True, 1, 0.2, 1, DEATHS, (None,))


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "soak", *arguments])


def test_a_short_episode() -> None:
    report, steps = Report(seed=7, workers=3), []
    run_episode(SHORT, 3, report, steps.append)
    assert report.tally.violations == []
    assert report.counts == {
        "worker joined": 3,
        "worker killed": 2,
        "worker joined again": 1,
        "worker left": 2,
    }
    assert {"sync", "large", "optimize", "pass_on", "count_marks"} <= set(report.tally.done)
    assert all(
        report.tally.cut_off[f"a {what} in flight"] == 4 for what in ("call", "method", "value")
    )
    assert len(report.notice_seconds) == 4
    assert steps[0] == "a mesh starts"
    assert steps[-1] == "the mesh ends"
    assert "no violations, nothing left behind" in report.as_text()


def test_a_worker_that_exits_by_itself_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_all(self: Any, function: Any, *args: Any) -> Any:
        return episode_module.results({0: self._mesh.submit(0, exit_now)})

    monkeypatch.setattr(episode_module._Driver, "_all", end_all)
    report = Report(seed=7, workers=3)
    run_episode(SHORT, 3, report, lambda what: None)
    [text] = report.tally.violations
    assert "WorkerExited: worker0 (pid " in text
    assert "exited with status 3" in text
    assert "that was all" in report.outputs["worker0"]
    assert "1 violations; the seed is 7" in report.as_text()


def exit_now() -> None:
    import os

    print("that was all", flush=True)
    os._exit(3)


def test_a_schedule_is_determined_by_the_seed() -> None:
    found = [schedule_episode(5, number, 6, 600.0) for number in range(6)]
    assert found == [schedule_episode(5, number, 6, 600.0) for number in range(6)]
    assert len({episode.name for episode in found}) == 6
    assert [episode.transport for episode in found[:3]] == [
        name for name, _ in schedule_module._TRANSPORTS
    ]
    assert found != [schedule_episode(6, number, 6, 600.0) for number in range(6)]
    assert all(0 < death.after < episode.seconds for episode in found for death in episode.deaths)
    # The time left bounds the length of an episode, but there always is one.
    assert schedule_episode(5, 0, 6, 0.0).healthy == 1


def test_violations_and_interrupts_are_reported_and_bad_arguments_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go_wrong(episode: Episode, workers: int, report: Report, show: Any) -> None:
        report.tally.violations.append(f"{episode.name} went wrong with {workers}")

    monkeypatch.setattr(run_module, "run_episode", go_wrong)
    done = invoke("--seed", "11", "--workers", "4", "--json", str(tmp_path / "soak.json"))
    assert done.exit_code == 1, done.output
    assert "seed 11, 4 workers, 1 min" in done.output
    assert "violation: 11.0 went wrong with 4" in done.output
    assert "1 violations; the seed is 11" in done.output
    data = json.loads((tmp_path / "soak.json").read_text())
    assert data["seed"] == 11
    assert data["violations"] == ["11.0 went wrong with 4"]

    def interrupt(episode: Episode, workers: int, report: Report, show: Any) -> None:
        report.tally.done["sync"] += 5
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "run_episode", interrupt)
    done = invoke("--minutes", "1")
    assert done.exit_code == 130
    assert "5 actions in" in done.output
    assert done.output.endswith("interrupted\n")
    for arguments, error in (
        (["--minutes", "0"], "0.0 is not in the range x>0"),
        (["--workers", "2"], "2 is not in the range x>=3"),
        (["--seed", "-1"], "-1 is not in the range x>=0"),
    ):
        done = invoke(*arguments)
        assert done.exit_code == 2
        assert error in done.output
