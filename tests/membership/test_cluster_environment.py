"""Which place in a mesh the variables of torchrun, Slurm, MPI and Kubernetes give a worker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrpc.membership.cluster_environment import (
    FULL_HOST_NAME,
    SETTINGS,
    find_settings,
    first_host,
    looked_for,
)

# As Slurm 22.05 sets them in a task of `srun -N2 -n4`.
SLURM = {
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "4",
}
# And in the script of `sbatch -N2 -n4`.
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "4",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
}
# As Open MPI 4.1 sets them in a process of `mpirun -np 4`.
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "PMIX_NAMESPACE": "657915905",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "12",
    "WORLD_SIZE": "16",
    FULL_HOST_NAME: "train-12.mesh.default.svc.cluster.local",
}
TORCH = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
}


def values(variables: dict[str, str]) -> dict[str, str]:
    return {name: setting.value for name, setting in find_settings(variables).items()}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCH, ("5", "8", "1", "10.0.0.1", "29400")),
        (SLURM, ("2", "4", "1", "n1", str(20000 + 3 * 97))),
        (PMI, ("1", "2", "1", "127.0.0.1", None)),
        (KUBERNETES, ("12", "16", None, "train-0.mesh.default.svc.cluster.local", "29500")),
    ],
    ids=["torchrun", "Slurm", "PMI", "an indexed job of Kubernetes"],
)
def test_the_place_of_a_worker(variables: dict[str, str], expected: tuple[str | None, ...]) -> None:
    found = values(variables)
    assert tuple(map(found.get, SETTINGS)) == expected


def test_a_step_of_slurm() -> None:
    sources = {name: setting.source for name, setting in find_settings(SLURM).items()}
    assert sources["rank"] == "SLURM_PROCID"
    assert sources["master_port"] == "SLURM_JOB_ID and SLURM_STEP_ID"
    # A step on some hosts of a job meets on its own first host.
    assert values({**SLURM, "SLURM_STEP_NODELIST": "n2"})["master_addr"] == "n2"


def test_a_batch_script_is_not_a_worker() -> None:
    assert values(BATCH_SCRIPT) == {}
    assert "SLURM_PROCID='0'" in looked_for(BATCH_SCRIPT, "rank").partition("; found ")[2]


def test_processes_of_mpirun() -> None:
    found = values(OPEN_MPI)
    assert tuple(map(found.get, SETTINGS[:4])) == ("3", "4", "3", "127.0.0.1")
    other = {**OPEN_MPI, "PMIX_NAMESPACE": "prterun-vm-77@1"}
    assert values(other)["master_port"] != found["master_port"]
    # On several hosts it does not say where rank 0 is.
    assert "master_addr" not in values({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})


def test_mpirun_in_a_job_of_slurm() -> None:
    """On the first host it runs in the batch script, on the others in a step of its daemons."""
    process = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    daemon = {**BATCH_SCRIPT, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n2"}
    daemon |= {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}
    here, there = values(BATCH_SCRIPT | process), values(daemon | process)
    assert here == there
    assert (here["rank"], here["world_size"], here["master_addr"]) == ("3", "4", "n1")


def test_a_step_of_slurm_with_pmi_is_slurms() -> None:
    assert values({**SLURM, "PMI_RANK": "2", "PMI_SIZE": "4"}) == values(SLURM)
    # But mpiexec starts a daemon on each host, and inherits what is the daemon's.
    assert values({**SLURM, "PMI_RANK": "7", "PMI_SIZE": "16"})["rank"] == "7"


def test_a_pod_whose_full_name_is_not_that_of_its_index_names_no_master() -> None:
    for name in ("train-12", "train-13.mesh", "12.mesh", "trainer"):
        assert "master_addr" not in values({**KUBERNETES, FULL_HOST_NAME: name})


def test_torchs_variables_come_first() -> None:
    given = {"MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for engine in (SLURM, OPEN_MPI, PMI, KUBERNETES):
        assert find_settings({**engine, **TORCH}) == find_settings(TORCH)
        expected = {**values(engine), "master_addr": "h", "master_port": "1"}
        assert values({**engine, **given}) == expected


def test_without_a_world_size_or_with_an_empty_one_a_mesh_in_a_step_is_elastic() -> None:
    found = values({**SLURM, "RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"})
    assert found == {"rank": "1", "master_addr": "h", "master_port": "1"}
    found = values({**SLURM, "WORLD_SIZE": ""})
    assert "world_size" not in found
    assert found["rank"] == "2"


@given(st.integers(0, 10**9), st.integers(0, 90))
def test_steps_of_consecutive_jobs_meet_at_different_ports(job: int, step: int) -> None:
    def port(job: int, step: int) -> int:
        variables = {**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        return int(values(variables)["master_port"])

    assert 20000 <= port(job, step) < 32000
    assert len({port(job, step), port(job, step + 1), port(job + 1, 0), port(job + 1, step)}) == (
        3 if step == 0 else 4
    )


@given(
    st.dictionaries(
        st.sampled_from(sorted({*TORCH, *SLURM, *OPEN_MPI, *PMI, *KUBERNETES})),
        st.sampled_from(["", " ", "0", "1", "4", "x", "n[1-2]", "n[", "a-4.b", "²"]),
    )
)
def test_any_variables_give_settings_that_are_not_empty(variables: dict[str, str]) -> None:
    for setting in find_settings(variables).values():
        assert setting.value.strip() == setting.value != ""
        assert all(variables[name].strip() for name in setting.source.split(" and "))
    looked_for(variables, "rank")


def test_an_error_says_which_variables_were_looked_for_and_found() -> None:
    text = looked_for({"WORLD_SIZE": "4", "HOME": "/"}, "rank")
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "SLURM_STEP_ID", "PMI_RANK"):
        assert name in text.partition("; found ")[0]
    assert text.endswith("; found WORLD_SIZE='4'")
    assert looked_for({}, "rank").endswith("found none of these variables")


# -- lists of hosts ------------------------------------------------------------------------


def test_lists_of_hosts_as_slurm_writes_them() -> None:
    for text, host in (
        ("vm", "vm"),
        ("n[1-2]", "n1"),
        ("gpu[003-005,9],login1", "gpu003"),
        ("rack[1-2]node[07,09]-x[3],b[4]", "rack1node07-x3"),
        ("a.cluster.example,b", "a.cluster.example"),
        (" n1\n", "n1"),
    ):
        assert first_host(text) == host
    for text in ("", ",n1", "n[", "n[]", "n[1-", "n[a]", "n[1-2]]", "(null)"):
        assert first_host(text) is None
