"""The job of examples/slurm is stopped and requeued by Slurm, and goes on where it was."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import SECONDS, run
from tests.support.waiting import until
from tests.support.warm import warm_commands

pytestmark = pytest.mark.engine
EXAMPLE = Path(__file__).parents[2] / "examples" / "slurm"
FOREVER = "1000000000"


class Job:
    """A job of the example's files; ends with the test."""

    def __init__(self, env: dict[str, str], directory: Path, *arguments: str) -> None:
        for name in ("job.sh", "train.py"):
            shutil.copy(EXAMPLE / name, directory)
        self._env = warm_commands().environment(env | {"HOME": str(directory)})
        self._directory = directory
        self.id = self.command("sbatch", "--parsable", "job.sh", *arguments).strip()

    def command(self, *words: str) -> str:
        return "\n".join(run(*words, env=self._env, cwd=self._directory))

    def output(self) -> str:
        path = self._directory / "train.out"
        return path.read_text() if path.exists() else ""

    def lines(self, start: str) -> list[str]:
        return [line for line in self.output().splitlines() if line.startswith(start)]

    def until_saved(self) -> None:
        until(lambda: (self._directory / "checkpoint.pt").exists(), self.output, within=SECONDS)

    def until_gone(self) -> None:
        shown = ("squeue", "-h", "-j", self.id)

        def gone() -> bool:
            time.sleep(0.2)  # Slurm has no event for it
            done = subprocess.run(shown, env=self._env, capture_output=True, text=True)
            return not done.stdout.strip()

        until(gone, lambda: self.command(*shown) + self.output(), within=SECONDS)


@pytest.fixture
def submit(slurm: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs = []

    def submit(*arguments: str) -> Job:
        jobs.append(Job(slurm, tmp_path, *arguments))
        return jobs[-1]

    yield submit
    for job in jobs:
        for options in (["--signal=KILL", "--full"], []):
            command = ["scancel", "--quiet", *options, job.id]
            subprocess.run(command, env=slurm, capture_output=True, timeout=SECONDS)
        job.until_gone()


def test_the_job_runs_to_its_end(submit: Callable[..., Job]) -> None:
    job = submit("--steps", "20")
    until(lambda: job.lines("finished"), job.output, within=SECONDS)
    job.until_gone()
    assert job.output().splitlines() == ["starts at step 0", "finished with step 20"]


def test_workers_that_are_told_to_stop_leave_in_good_order(submit: Callable[..., Job]) -> None:
    job = submit("--steps", FOREVER)
    job.until_saved()
    stacks = ("srun", "--jobid", job.id, "--overlap", "--ntasks", "1", "zrpc", "stacks")
    assert {"worker0", "worker3"} <= set(job.command(*stacks).split())
    job.command("scancel", "--signal=TERM", job.id)
    until(lambda: job.lines("stopped"), job.output, within=SECONDS)
    job.until_gone()
    # None was killed, and none has complained.
    shown = job.command("scontrol", "--oneliner", "show", "job", job.id)
    assert " JobState=COMPLETED " in shown, shown + job.output()
    lines = [line for line in job.output().splitlines() if not line.startswith("slurmstepd")]
    assert [line.split()[0] for line in lines] == ["starts", "stopped"]


def test_a_requeued_job_goes_on_where_it_was(submit: Callable[..., Job]) -> None:
    job = submit("--steps", FOREVER)
    job.until_saved()
    job.command("scontrol", "requeue", job.id)
    until(lambda: len(job.lines("starts")) == 2, job.output, within=4 * SECONDS)
    [stopped] = job.lines("stopped at step ")
    assert job.lines("starts")[1] == f"starts at step {stopped.split()[-1]}", job.output()
