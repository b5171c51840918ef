"""Slurm starts workers of scripts that set no variables."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.conftest import SECONDS, WORKER, run
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


def test_srun_starts_workers_on_two_nodes(slurm: dict[str, str]) -> None:
    python = warm_commands().python
    lines = run("srun", "-N2", "-n4", python, str(WORKER), env=slurm)
    assert lines == [f"worker{rank} of 4 {rank**2}" for rank in range(4)]


def test_a_batch_script_is_no_worker_but_its_steps_are(
    slurm: dict[str, str], tmp_path: Path
) -> None:
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
