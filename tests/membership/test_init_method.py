"""The rank, the world size and the master: from arguments, the URL, the environment, a launcher."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from unittest import mock

import pytest

from tests.membership.test_cluster_environment import SLURM
from tests.support.records import peer_record
from zrpc.errors import RendezvousError
from zrpc.launch.worker import EnvironmentTemplate, base_environment, without_launcher
from zrpc.membership.init_method import (
    agent_store,
    local_world_size,
    master,
    master_host,
    own_variable,
    private_file,
    resolve_name,
    resolve_rank,
    restart_count,
)
from zrpc.membership.launched import launched

HERE = ("127.0.0.1", 80)
ELSEWHERE = ("127.0.0.1", 81)
Setting = Callable[..., None]


VARIABLES = """ZRPC_TRACE ZRPC_LAUNCHED ZRPC_WORKER_NAME ZRPC_STORE_DIR ZRPC_MAX_RESTARTS RANK
    WORLD_SIZE MASTER_ADDR MASTER_PORT LOCAL_WORLD_SIZE TORCHELASTIC_RESTART_COUNT
    TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_RUN_ID"""


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Setting:
    """Sets variables; those that are None are removed, and at first all are."""

    def setting(**variables: str | None) -> None:
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    setting(**dict.fromkeys(VARIABLES.split()))
    return setting


def test_arguments_come_first(setting: Setting) -> None:
    setting(RANK="3", WORLD_SIZE="9")
    assert resolve_rank("env://", 1, 4) == (1, 4)
    assert resolve_rank("env://", -1, None) == (3, 9)
    assert resolve_rank("env://", 0, None) == (0, 9)
    assert resolve_rank("tcp://h:1?rank=2&world_size=5", -1, None) == (2, 5)
    assert resolve_rank("tcp://h:1?rank=2", -1, None) == (2, 9)
    assert resolve_rank("tcp://h:1?rank=2&world_size=5", 1, 4) == (1, 4)
    setting(**SLURM, RANK=None, WORLD_SIZE=None)
    assert resolve_rank("env://", 1, None) == (1, 4)
    setting(MASTER_ADDR="elsewhere")
    assert master("env://") == ("elsewhere", 20291)


def test_a_name_server_is_asked_only_for_a_master_that_is_not_set(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def full_name() -> str:
        asked.append("once")
        return "train-1.mesh.default.svc"

    monkeypatch.setattr("socket.getfqdn", full_name)
    setting(JOB_COMPLETION_INDEX="1", WORLD_SIZE="2")
    assert resolve_rank("env://", -1, None) == (1, 2)
    assert asked == []
    assert master("env://") == ("train-0.mesh.default.svc", 29500)
    assert asked == ["once"]
    setting(MASTER_ADDR="train-0.mesh")
    assert master("env://") == ("train-0.mesh", 29500)
    assert asked == ["once"]


def test_a_missing_master_or_rank_says_what_was_looked_for(setting: Setting) -> None:
    with pytest.raises(RendezvousError, match=r"looked for RANK, .*; found none"):
        resolve_rank("env://", -1, 2)
    setting(OMPI_COMM_WORLD_RANK="1")
    with pytest.raises(
        RendezvousError,
        match=r"looked for MASTER_ADDR.*SLURM_STEP_NODELIST.*found OMPI_COMM_WORLD_RANK='1'$",
    ):
        master("env://")


def test_without_a_world_size_a_mesh_is_elastic(setting: Setting) -> None:
    assert resolve_rank("env://", 0, None) == (0, None)
    assert resolve_rank("env://", -1, None) == (None, None)
    assert resolve_rank("env://", 3, -1) == (3, None)
    setting(RANK="2")
    assert resolve_rank("env://", -1, None) == (2, None)


def test_restarts_count_only_if_workers_are_restarted_one_by_one(setting: Setting) -> None:
    assert restart_count(4) is None
    assert restart_count(None) == 0
    setting(TORCHELASTIC_RESTART_COUNT="2")
    assert restart_count(4) is None  # torchrun's: all are started again
    assert restart_count(None) == 2
    setting(ZRPC_MAX_RESTARTS="3")
    assert restart_count(4) == 2
    setting(TORCHELASTIC_RESTART_COUNT="often")
    with pytest.raises(RendezvousError, match="TORCHELASTIC_RESTART_COUNT, found 'often'"):
        restart_count(4)


def test_a_rank_must_fit_and_be_a_number(setting: Setting) -> None:
    for rank, size in ((2, 2), (5, 2), (0, 0), (1 << 15, None)):
        with pytest.raises(ValueError, match=f"got rank={rank} and world_size={size}"):
            resolve_rank("env://", rank, size)
    for text in ("", "  ", "three"):
        setting(RANK=text, WORLD_SIZE="2")
        with pytest.raises(RendezvousError, match="rank"):
            resolve_rank("env://", -1, None)


def test_the_masters_address(setting: Setting) -> None:
    assert master_host("tcp://10.0.0.7:99") == "10.0.0.7"
    assert master_host("tcp://[::1]:99") == "::1"
    assert master_host("file:///x")
    setting(MASTER_ADDR="[::1]", MASTER_PORT="80")  # it may be in brackets
    assert master("env://") == ("::1", 80)
    setting(MASTER_ADDR="master", MASTER_PORT="65536")
    with pytest.raises(RendezvousError, match="up to 65535 in MASTER_PORT, found 65536"):
        master("env://")


def test_workers_of_one_launcher_meet_in_its_directory(setting: Setting) -> None:
    here = ("127.0.0.1", 80)
    assert private_file("env://", here, 2) is None
    setting(ZRPC_STORE_DIR="/run/x")
    assert private_file("env://", here, 2) == "/run/x/store-80"
    assert private_file("env://", ("localhost", 81), 2) == "/run/x/store-81"
    # A program that names another place means it.
    assert private_file("env://", ("elsewhere", 80), 2) is None
    assert private_file("tcp://127.0.0.1:80", here, 2) is None
    setting(TORCHELASTIC_USE_AGENT_STORE="True")
    assert private_file("env://", here, 2) is None


# -- of a launcher ---------------------------------------------------------------------------


def worker(*, restarts: int = 0, elastic: bool = False) -> dict[str, str]:
    """What `zrpc launch` sets for rank 1 of 3 workers."""
    template = EnvironmentTemplate(3, "trainer", *HERE, "/run/x", 0, elastic, restarts)
    return template.for_worker({}, 1, restarts)


def test_variables_count_for_the_worker_that_they_were_made_for(setting: Setting) -> None:
    setting(**worker())
    assert resolve_name(None, 1, 3) == resolve_name(None, 1, 3, "tcp://localhost:80") == "trainer1"
    assert private_file("env://", HERE, 3) == "/run/x/store-80"
    assert private_file("env://", ("localhost", 80), 3) == "/run/x/store-80"
    assert restart_count(3, 1) is None
    assert local_world_size(3) == 3


def test_a_name_does_not_count_for_another_rank_or_mesh(setting: Setting) -> None:
    for rank, size, own in (
        *((0, 3, {}), (1, 2, {}), (1, None, {}), (None, 3, {})),
        *((1, 3, {"MASTER_PORT": "81"}), (1, 3, {"MASTER_ADDR": "10.0.0.1"})),
    ):
        setting(**{**worker(), **own})
        if rank is not None:
            assert resolve_name(None, rank, size) == f"worker{rank}"
        assert not launched().is_worker((own.get("MASTER_ADDR", HERE[0]), 81), size, rank)
    setting(**worker())
    for elsewhere in ("file:///x", "tcp://127.0.0.1:81"):
        assert resolve_name(None, 1, 3, elsewhere) == "worker1"


def test_what_was_set_since_counts(setting: Setting) -> None:
    setting(**{**worker(restarts=2), "RANK": "0", "ZRPC_WORKER_NAME": "chief"})
    setting(ZRPC_MAX_RESTARTS="5", TORCHELASTIC_RESTART_COUNT="4", LOCAL_WORLD_SIZE="7")
    assert resolve_name(None, 0, 3) == "chief"
    assert restart_count(8, 0) == 4
    assert local_world_size(8) == 7


def test_the_store_is_that_of_one_mesh(setting: Setting) -> None:
    setting(**worker())
    assert private_file("env://", HERE, 2) == "/run/x/store-80-2"
    assert private_file("env://", ELSEWHERE, 3) == "/run/x/store-81"
    assert private_file("env://", ELSEWHERE, 2) is None  # others may be in it
    setting(**worker(restarts=2))  # the launcher hosts it
    assert agent_store(HERE)
    assert not agent_store(ELSEWHERE)
    setting(TORCHELASTIC_RUN_ID="none")  # torchrun has set both again
    assert agent_store(ELSEWHERE)


def test_restarts_count_only_in_their_mesh_and_for_their_worker(setting: Setting) -> None:
    setting(**worker(restarts=2))
    assert restart_count(3, 1) == 2
    assert restart_count(3, 0) == 0
    assert restart_count(2, 1) is None
    assert restart_count(3, 1, "file:///x") is None
    setting(**{**worker(elastic=True, restarts=2), "WORLD_SIZE": None})
    assert restart_count(None, 1) == 2
    assert restart_count(None, 5) == 0


def test_files_and_ports_are_those_of_one_worker(setting: Setting) -> None:
    template = EnvironmentTemplate(3, "trainer", *HERE, "/run/x")
    setting(**template.for_worker({"ZRPC_TRACE": "/traces"}, 1, 0))
    assert own_variable("ZRPC_TRACE", peer_record(1, 3)) == "/traces"
    assert own_variable("ZRPC_TRACE", peer_record(0, 3)) == ""
    assert own_variable("ZRPC_TRACE", peer_record(1, 2)) == ""
    setting(MASTER_PORT="81")
    assert own_variable("ZRPC_TRACE", peer_record(1, 3)) == ""
    setting(ZRPC_TRACE="/others")
    assert own_variable("ZRPC_TRACE", peer_record(0, 3)) == "/others"


def test_without_a_launcher_all_variables_count(setting: Setting) -> None:
    setting(ZRPC_WORKER_NAME="mine", TORCHELASTIC_USE_AGENT_STORE="True", ZRPC_MAX_RESTARTS="1")
    assert resolve_name(None, 4, 9) == "mine"
    assert agent_store(ELSEWHERE)
    assert restart_count(9, 4) == 0


def test_spoiled_variable_counts_as_none() -> None:
    for text in ("", "{"):
        variables = {"ZRPC_LAUNCHED": text, "ZRPC_WORKER_NAME": "mine"}
        assert launched(variables).get("ZRPC_WORKER_NAME", False) == "mine"
        assert without_launcher(variables) == {"ZRPC_WORKER_NAME": "mine"}


def test_a_launcher_in_a_worker_starts_from_what_the_first_one_had() -> None:
    environ = {**worker(restarts=2), "MINE": "1", "RANK": "changed"}
    with mock.patch.dict(os.environ, environ, clear=True):
        found = base_environment(1, {"ZRPC_SECRET_FILE": "x"})
    kept = {"MINE": "1", "RANK": "changed"}
    assert found == {**kept, "ZRPC_RUNTIME_DIR": "/run", "ZRPC_SECRET_FILE": "x"}
    assert json.loads(worker()["ZRPC_LAUNCHED"])["ZRPC_WORKER_NAME"] == "trainer1"
