from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.support.records import peer_record
from zrpc.launch.worker import EnvironmentTemplate, base_environment, without_launcher
from zrpc.membership.init_method import (
    agent_store,
    local_world_size,
    own_variable,
    private_file,
    resolve_name,
    restart_count,
)
from zrpc.membership.launched import launched

HERE = ("127.0.0.1", 80)
ELSEWHERE = ("127.0.0.1", 81)
Setting = Callable[..., None]


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Setting:
    """Sets variables; those that are None are removed."""
    names = (
        "ZRPC_TRACE",
        "ZRPC_LAUNCHED",
        "ZRPC_WORKER_NAME",
        "ZRPC_STORE_DIR",
        "ZRPC_MAX_RESTARTS",
    )
    more = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "ZRPC_TRACE")
    torchruns = ("RESTART_COUNT", "MAX_RESTARTS", "USE_AGENT_STORE", "RUN_ID")

    def setting(**variables: str | None) -> None:
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    setting(**dict.fromkeys([*names, *more, *(f"TORCHELASTIC_{name}" for name in torchruns)]))
    return setting


def worker(*, restarts: int = 0, elastic: bool = False) -> dict[str, str]:
    """What `zrpc launch` sets for rank 1 of 3 workers."""
    template = EnvironmentTemplate(3, "trainer", *HERE, "/run/x", 0, elastic, restarts)
    return template.for_worker({}, 1, restarts)


def test_variables_count_for_the_worker_that_they_were_made_for(setting: Setting) -> None:
    setting(**worker())
    assert resolve_name(None, 1, 3) == "trainer1"
    assert private_file("env://", HERE, 3) == "/run/x/store-80"
    assert private_file("env://", ("localhost", 80), 3) == "/run/x/store-80"
    assert restart_count(3, 1) is None
    assert local_world_size(3) == 3


@pytest.mark.parametrize(
    ("rank", "size", "own"),
    [
        (0, 3, {}),
        (1, 2, {}),
        (1, None, {}),
        (None, 3, {}),
        (1, 3, {"MASTER_PORT": "81"}),
        (1, 3, {"MASTER_ADDR": "10.0.0.1"}),
    ],
)
def test_name_does_not_count_for_another_rank_or_mesh(
    setting: Setting, rank: int | None, size: int | None, own: dict[str, str]
) -> None:
    setting(**{**worker(), **own})
    if rank is not None:
        assert resolve_name(None, rank, size) == f"worker{rank}"
    assert not launched().is_worker((own.get("MASTER_ADDR", HERE[0]), 81), size, rank)


@pytest.mark.parametrize("init_method", ["file:///x", "tcp://127.0.0.1:81"])
def test_name_does_not_count_at_another_meeting_place(setting: Setting, init_method: str) -> None:
    setting(**worker())
    assert resolve_name(None, 1, 3, init_method) == "worker1"
    assert resolve_name(None, 1, 3, "tcp://localhost:80") == "trainer1"


def test_what_was_set_since_counts(setting: Setting) -> None:
    setting(**{**worker(restarts=2), "RANK": "0", "ZRPC_WORKER_NAME": "chief"})
    setting(ZRPC_MAX_RESTARTS="5", TORCHELASTIC_RESTART_COUNT="4", LOCAL_WORLD_SIZE="7")
    assert resolve_name(None, 0, 3) == "chief"
    assert restart_count(8, 0) == 4
    assert local_world_size(8) == 7


def test_store_in_a_file_is_that_of_one_mesh(setting: Setting) -> None:
    setting(**worker())
    assert private_file("env://", HERE, 2) == "/run/x/store-80-2"
    assert private_file("env://", ELSEWHERE, 3) == "/run/x/store-81"
    assert private_file("env://", ELSEWHERE, 2) is None  # others may be in it


def test_store_of_the_launcher_is_only_at_its_address(setting: Setting) -> None:
    setting(**worker(restarts=2))
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


@pytest.mark.parametrize("text", ["", "{"])
def test_spoiled_variable_counts_as_none(text: str) -> None:
    variables = {"ZRPC_LAUNCHED": text, "ZRPC_WORKER_NAME": "mine"}
    assert launched(variables).get("ZRPC_WORKER_NAME", False) == "mine"
    assert without_launcher(variables) == {"ZRPC_WORKER_NAME": "mine"}


def test_a_launcher_in_a_worker_starts_from_what_the_first_one_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.environ", {**worker(restarts=2), "MINE": "1", "RANK": "changed"})
    found = base_environment(1, {"ZRPC_SECRET_FILE": "x"})
    assert found == {
        "MINE": "1",
        "RANK": "changed",
        "ZRPC_RUNTIME_DIR": "/run",
        "ZRPC_SECRET_FILE": "x",
    }
    assert json.loads(worker()["ZRPC_LAUNCHED"])["ZRPC_WORKER_NAME"] == "trainer1"
