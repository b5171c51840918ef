"""Open MPI starts workers of scripts that set no variables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engines.conftest import engine_environment, need, run
from tests.support.warm import warm_commands

pytestmark = pytest.mark.engine
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "launch.md"


@pytest.fixture
def open_mpi() -> dict[str, str]:
    need("openmpi-bin", "mpirun", "ompi_info")
    return engine_environment(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")


def test_the_command_of_the_page_runs_as_it_is(open_mpi: dict[str, str], tmp_path: Path) -> None:
    text = PAGE.read_text()
    [command] = re.findall(r"```sh\n(mpirun .*)\n```", text)
    [work] = re.findall(r"```python\n# work\.py\n(.*?)```", text, re.S)
    (tmp_path / "work.py").write_text(work)
    more = {"OMPI_MCA_rmaps_base_oversubscribe": "1"}  # on machines with fewer cores
    env = warm_commands().environment(open_mpi | more)
    lines = run("bash", "-c", command, env=env, cwd=tmp_path)
    assert lines == [f"WorkerInfo(id={rank}, name=worker{rank}) []" for rank in range(4)]
