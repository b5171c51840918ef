"""Open MPI starts workers of scripts that set no variables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.engines.conftest import WORKER, engine_environment, need, run

pytestmark = pytest.mark.engine


@pytest.fixture
def open_mpi() -> dict[str, str]:
    need("openmpi-bin", "mpirun", "ompi_info")
    return engine_environment(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")


def test_mpirun_starts_workers(open_mpi: dict[str, str], tmp_path: Path) -> None:
    command = ["mpirun", "--oversubscribe", "-np", "4", sys.executable, str(WORKER)]
    assert run(*command, env=open_mpi, cwd=tmp_path) == [
        "worker0 of 4 0",
        "worker1 of 4 1",
        "worker2 of 4 4",
        "worker3 of 4 9",
    ]
