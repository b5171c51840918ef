"""Slurm starts workers of scripts that set no variables; and stops and requeues a job."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import SECONDS, WORKER, run
from tests.support.waiting import until
from tests.support.warm import warm_commands
from zrpc.membership.secret import new_secret

pytestmark = pytest.mark.engine
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "slurm.md"

_BATCH = """#!/bin/sh
#SBATCH --nodes 2
#SBATCH --ntasks 4
{python} -m zrpc.cli env
srun --ntasks 2 {python} {worker}
"""


def test_batch_scripts_are_no_workers_but_steps_are(slurm: dict[str, str], tmp_path: Path) -> None:
    script, output = tmp_path / "job.sh", tmp_path / "job.out"
    # Interpreters of their own, as users have them.
    script.write_text(_BATCH.format(python=sys.executable, worker=WORKER))
    command = ["sbatch", "--wait", "--output", str(output), str(script)]
    done = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=SECONDS)
    text = output.read_text()
    assert done.returncode == 0, done.stderr + text
    assert "rank not found" in text
    assert "SLURM_PROCID='0'" in text
    assert {"worker0 of 2 0", "worker1 of 2 1"} <= set(text.splitlines())


def test_two_steps_at_once_meet_apart(slurm: dict[str, str]) -> None:
    """Two meshes of one job on the same hosts: each step has a port of its own."""
    step = f"srun --overlap -N2 -n2 {warm_commands().python} {WORKER}"
    both = f"{step} & first=$!; {step}; second=$?; wait $first && exit $second"
    lines = run("salloc", "-Q", "-N2", "-n2", "sh", "-c", both, env=slurm)
    assert lines == ["worker0 of 2 0"] * 2 + ["worker1 of 2 1"] * 2


def test_the_job_of_the_page_runs_as_it_stands(slurm: dict[str, str], tmp_path: Path) -> None:
    blocks = dict(re.findall(r"```\w+\n(# mesh\.py|#!/bin/bash)\n(.*?)```", PAGE.read_text(), re.S))
    (tmp_path / "mesh.py").write_text(blocks["# mesh.py"])
    (tmp_path / "job.sh").write_text("#!/bin/bash\n" + blocks["#!/bin/bash"])
    env = {**warm_commands().environment(slurm), "HOME": str(tmp_path)}
    (tmp_path / "mesh.secret").write_text(new_secret())
    (tmp_path / "mesh.secret").chmod(0o600)
    command = ["sbatch", "--wait", "job.sh"]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    output = (tmp_path / "mesh.out").read_text()
    assert done.returncode == 0, done.stderr + output
    expected = [f"worker{rank} of 4 {max(rank, 1)}" for rank in range(4)]
    assert sorted(output.splitlines()) == expected


# The job of examples/slurm goes on where it was.

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
