"""Names in meshes whose workers are killed, and join."""

from __future__ import annotations

from typing import Any

import pytest

import zrpc as rpc
from tests.support.waiting import SOON
from zrpc.testing import Mesh


class Replay:
    def __init__(self, value: int) -> None:
        self.value = value

    def get(self) -> tuple[int, str]:
        return self.value, rpc.get_worker_info().name


def make(to: str, value: int, name: str = "replay", **more: Any) -> Any:
    rpc.remote(to, Replay, (value,), name=name, **more)


def get(name: str = "replay") -> Any:
    return rpc.get_actor(name, SOON).rpc_sync().get()


@pytest.mark.zrpc(workers=4, processes=True, timeout=60)
def test_names_outlive_all_workers_but_their_owner(mesh: Mesh) -> None:
    mesh.run(2, make, "worker1", 1, name="lost")
    mesh.run(2, make, "worker3", 3, name="kept")
    search = mesh.submit(3, get, "later")
    mesh.kill(0)  # has granted the names
    mesh.kill(1)
    assert mesh.run(2, get, "kept") == (3, "worker3")
    mesh.run(2, make, "worker3", 4, name="lost", exist_ok=True)  # waits until it is free
    assert mesh.run(2, get, "lost") == (4, "worker3")
    mesh.run(2, make, "worker2", 5, name="later")
    assert search.result(SOON) == (5, "worker2")


def share(value: int) -> Any:
    own = rpc.get_worker_info().name
    return rpc.remote(own, Replay, (value,), name="replay", exist_ok=True).rpc_sync().get()


@pytest.mark.zrpc(workers=4, processes=True, timeout=60)
def test_makers_share_one_actor_while_workers_die(mesh: Mesh) -> None:
    futures = [mesh.submit(worker, share, worker) for worker in (1, 2, 3)]
    mesh.kill(0)
    values = {future.result(SOON) for future in futures}
    assert len(values) == 1
    [(value, owner)] = values
    mesh.kill(owner)
    left = [worker for worker in (1, 2, 3) if worker != value]
    futures = [mesh.submit(worker, share, worker) for worker in left]
    again = {future.result(SOON) for future in futures}
    assert len(again) == 1
    assert again != values


def make_many(gone: str) -> None:
    for number in range(300):
        to = ("worker1", "worker2")[number % 2]
        rpc.remote(to, Replay, (number,), name=f"{gone}/{number}")


def share_by_name(name: str) -> Any:
    return rpc.remote("worker1", Replay, (-1,), name=name, exist_ok=True).rpc_sync().get()[0]


@pytest.mark.zrpc(workers=4, processes=True, timeout=60)
@pytest.mark.parametrize("victim", [0, 3])  # which grants the names, or makes the actors
def test_a_worker_that_dies_in_the_midst_of_claims_leaves_no_name_without_an_actor(
    mesh: Mesh, victim: int
) -> None:
    making = [mesh.submit(worker, make_many, f"by{worker}") for worker in (2, 3)]
    mesh.run(1, get, "by3/5")
    mesh.kill(victim)
    making[0].result(SOON)
    if victim != 3:
        making[1].result(SOON)

    for number in range(0, 100, 10):
        assert mesh.run(1, share_by_name, f"by3/{number}") in (number, -1)
