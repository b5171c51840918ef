"""zrpc env prints what a worker would take, and from where."""

from __future__ import annotations

import os

import pytest
from click.testing import CliRunner, Result

from tests.membership.test_cluster_environment import BATCH_SCRIPT, KUBERNETES
from zrpc.cli import main


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("SLURM_", "OMPI_", "PMI", "MPI_", "JOB_", "MASTER_")) or name in (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
        ):
            monkeypatch.delenv(name)


def run(variables: dict[str, str]) -> Result:
    return CliRunner().invoke(main, ["env"], env=variables)


def test_the_host_name_of_a_pod_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getfqdn", lambda: "train-3.mesh.default.svc")
    done = run({"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": KUBERNETES["WORLD_SIZE"]})
    assert done.exit_code == 0
    assert "master_addr=train-0.mesh.default.svc from JOB_COMPLETION_INDEX and" in done.output


def test_what_is_missing_is_shown_with_what_was_found() -> None:
    done = run(BATCH_SCRIPT)
    assert done.exit_code == 1
    assert "rank not found" in done.output
    assert "the mesh is elastic" in done.output
    assert (
        "rank, master_addr, master_port: looked for RANK, MASTER_ADDR, MASTER_PORT" in done.output
    )
    looked_for, _, found = done.output.partition("; found ")
    assert "SLURM_STEP_ID" in looked_for
    assert "SLURM_PROCID='0'" in found
