"""The rank, the world size and the master: from arguments, the URL and the environment."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.membership.test_cluster_environment import SLURM
from zrpc.errors import RendezvousError
from zrpc.membership.init_method import (
    master,
    master_host,
    private_file,
    resolve_rank,
    restart_count,
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ZRPC_MAX_RESTARTS")
    torchruns = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE")
    for name in (*names, *torchruns, "ZRPC_STORE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch.setenv


def test_arguments_come_first(environment: Callable[[str, str], None]) -> None:
    environment("RANK", "3")
    environment("WORLD_SIZE", "9")
    assert resolve_rank("env://", 1, 4) == (1, 4)
    assert resolve_rank("env://", -1, None) == (3, 9)
    assert resolve_rank("env://", 0, None) == (0, 9)
    assert resolve_rank("tcp://h:1?rank=2&world_size=5", -1, None) == (2, 5)
    assert resolve_rank("tcp://h:1?rank=2", -1, None) == (2, 9)
    assert resolve_rank("tcp://h:1?rank=2&world_size=5", 1, 4) == (1, 4)


def test_the_variables_of_slurm_are_taken(environment: Callable[[str, str], None]) -> None:
    for name, value in SLURM.items():
        environment(name, value)
    assert resolve_rank("env://", -1, None) == (2, 4)
    assert resolve_rank("env://", 1, None) == (1, 4)
    assert resolve_rank("tcp://h:1?rank=3&world_size=5", -1, None) == (3, 5)
    assert master("env://") == ("n1", 20291)
    environment("MASTER_ADDR", "elsewhere")
    assert master("env://") == ("elsewhere", 20291)


def test_a_name_server_is_asked_only_for_a_master_that_is_not_set(
    environment: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def full_name() -> str:
        asked.append("once")
        return "train-1.mesh.default.svc"

    monkeypatch.setattr("socket.getfqdn", full_name)
    environment("JOB_COMPLETION_INDEX", "1")
    environment("WORLD_SIZE", "2")
    assert resolve_rank("env://", -1, None) == (1, 2)
    assert asked == []
    assert master("env://") == ("train-0.mesh.default.svc", 29500)
    assert asked == ["once"]
    environment("MASTER_ADDR", "train-0.mesh")
    assert master("env://") == ("train-0.mesh", 29500)
    assert asked == ["once"]


def test_a_missing_master_says_what_was_looked_for(
    environment: Callable[[str, str], None],
) -> None:
    environment("OMPI_COMM_WORLD_RANK", "1")
    with pytest.raises(
        RendezvousError,
        match=r"looked for MASTER_ADDR.*SLURM_STEP_NODELIST.*found OMPI_COMM_WORLD_RANK='1'$",
    ):
        master("env://")


def test_a_missing_rank_is_named(environment: Callable[[str, str], None]) -> None:
    with pytest.raises(RendezvousError, match=r"looked for RANK, .*; found none"):
        resolve_rank("env://", -1, 2)


def test_without_a_world_size_a_mesh_is_elastic(environment: Callable[[str, str], None]) -> None:
    assert resolve_rank("env://", 0, None) == (0, None)
    assert resolve_rank("env://", -1, None) == (None, None)
    assert resolve_rank("env://", 3, -1) == (3, None)
    environment("RANK", "2")
    assert resolve_rank("env://", -1, None) == (2, None)


def test_restarts_count_only_if_workers_are_restarted_one_by_one(
    environment: Callable[[str, str], None],
) -> None:
    assert restart_count(4) is None
    assert restart_count(None) == 0
    environment("TORCHELASTIC_RESTART_COUNT", "2")
    assert restart_count(4) is None  # torchrun's: all are started again
    assert restart_count(None) == 2
    environment("ZRPC_MAX_RESTARTS", "3")
    assert restart_count(4) == 2
    environment("TORCHELASTIC_RESTART_COUNT", "often")
    with pytest.raises(RendezvousError, match="TORCHELASTIC_RESTART_COUNT, found 'often'"):
        restart_count(4)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (5, 2), (0, 0), (1 << 15, None)])
def test_a_rank_must_fit(
    environment: Callable[[str, str], None], rank: int, size: int | None
) -> None:
    with pytest.raises(ValueError, match=f"got rank={rank} and world_size={size}"):
        resolve_rank("env://", rank, size)


@pytest.mark.parametrize("text", ["", "  ", "three"])
def test_a_variable_that_is_not_a_number(
    environment: Callable[[str, str], None], text: str
) -> None:
    environment("RANK", text)
    environment("WORLD_SIZE", "2")
    with pytest.raises(RendezvousError, match="rank"):
        resolve_rank("env://", -1, None)


def test_the_masters_host(environment: Callable[[str, str], None]) -> None:
    assert master_host("tcp://10.0.0.7:99") == "10.0.0.7"
    assert master_host("tcp://[::1]:99") == "::1"
    environment("MASTER_ADDR", "master")
    environment("MASTER_PORT", "1")
    assert master_host("env://") == "master"
    assert master_host("file:///x")


def test_the_masters_address_may_be_in_brackets(environment: Callable[[str, str], None]) -> None:
    environment("MASTER_ADDR", "[::1]")
    environment("MASTER_PORT", "80")
    assert master("env://") == ("::1", 80)


def test_a_port_that_does_not_exist(environment: Callable[[str, str], None]) -> None:
    environment("MASTER_ADDR", "master")
    environment("MASTER_PORT", "65536")
    with pytest.raises(RendezvousError, match="up to 65535 in MASTER_PORT, found 65536"):
        master("env://")


def test_workers_of_one_launcher_meet_in_its_directory(
    environment: Callable[[str, str], None],
) -> None:
    here = ("127.0.0.1", 80)
    assert private_file("env://", here, 2) is None
    environment("ZRPC_STORE_DIR", "/run/x")
    assert private_file("env://", here, 2) == "/run/x/store-80"
    assert private_file("env://", ("localhost", 81), 2) == "/run/x/store-81"
    # A program that names another place means it.
    assert private_file("env://", ("elsewhere", 80), 2) is None
    assert private_file("tcp://127.0.0.1:80", here, 2) is None
    environment("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert private_file("env://", here, 2) is None
