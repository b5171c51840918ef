"""Actors that are made under a name, and found by it."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial
from typing import Any, ClassVar

import pytest

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.identity import emptied
from tests.support.observed import living
from tests.support.targets import Unreadable
from tests.support.waiting import SOON, until
from zrpc.services.names import claims
from zrpc.services.names.messages import Ask
from zrpc.services.names.service import NameService
from zrpc.services.names.waiting import Waiting
from zrpc.testing import Mesh, faults

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)

WORKERS = ["worker0", "worker1", "worker2"]


made: list[Any] = emptied([])


class Made:
    """Notes with what it was made, and which instances live."""

    living: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def __init__(self, value: Any = None) -> None:
        made.append(value)
        Made.living.add(self)
        self.value = value

    def get(self) -> Any:
        return self.value


class Failing:
    def __init__(self) -> None:
        Made()
        raise KeyError("the constructor's own error")


def make(to: str, value: Any = None, name: str = "replay", **more: Any) -> Any:
    return rpc.remote(to, Made, args=(value,), name=name, **more)


def make_and_forget() -> None:
    rpc.remote("worker1", rpc.actor(Made, concurrency=1), name="replay")


def get(name: str = "replay", timeout: float = SOON) -> Any:
    return rpc.get_actor(name, timeout).rpc_sync().get()


def questions() -> list[Any]:
    """What threads of this process wait for at the moment, and questions that have no answer."""
    return [*living(Waiting), *living(Ask)]


def names_held(mesh: Mesh) -> list[int]:
    services = [mesh.agent(worker).service(NameService) for worker in WORKERS]
    return [service.stats()["names_held"] for service in services]


# -- names -----------------------------------------------------------------------------------


def test_an_actor_is_found_by_its_name_which_may_be_any_text_on_any_worker(mesh: Mesh) -> None:
    name = "Ä /\n'\"🙂"
    actor = mesh.run(0, make, "worker1", 5, name)
    assert mesh.run_all(get, name) == [5, 5, 5]
    assert mesh.run(0, rpc.get_actor, name) == actor
    assert mesh.run(1, lambda: rpc.get_actor(name).is_owner())
    assert mesh.run(1, lambda: rpc.get_actor(name).local_value().value) == 5


@pytest.mark.parametrize("owner", WORKERS)
def test_a_name_that_is_taken_is_refused_with_who_has_it(mesh: Mesh, owner: str) -> None:
    mesh.run(2, make, owner)
    for maker, to in ((0, "worker1"), (2, owner)):
        with pytest.raises(rpc.RpcError) as caught:
            mesh.run(maker, make, to)
        told = str(caught.value)
        assert f"'replay' is taken by Made on {owner}, made by worker2 (rank 2)" in told
        assert "stop() if it is an actor's, else it lasts until the owner leaves" in told
        assert caught.value.executed is False
    assert len(made) == 1
    mesh.run(0, make, "worker1", name="another")


def test_the_name_keeps_the_actor_alive_until_it_is_stopped(mesh: Mesh) -> None:
    mesh.run(0, make_and_forget)
    gc.collect()
    assert mesh.run(2, get) is None
    assert len(Made.living) == 1
    mesh.run(2, lambda: rpc.get_actor("replay").stop(SOON))
    until(lambda: not Made.living, collect=True)
    mesh.run(2, make, "worker2", "next")
    assert mesh.run(0, get) == "next"
    assert names_held(mesh) == [0, 0, 1]


def test_arguments_that_cannot_be_pickled_or_unpickled_take_no_name(mesh: Mesh) -> None:
    with pytest.raises(rpc.SerializationError):
        mesh.run(0, make, "worker1", threading.Lock())
    failed = mesh.run(0, make, "worker1", Unreadable())
    with pytest.raises(rpc.SerializationError):
        mesh.run(0, failed.to_here)
    until(lambda: names_held(mesh) == [0, 0, 0])
    mesh.run(0, make, "worker1", 3)
    assert mesh.run(0, get) == 3


def test_a_name_of_another_form_or_for_several_actors_is_refused(mesh: Mesh) -> None:
    for name in ("", 5, "n" * 1025, b"bytes"):
        for use in (partial(make, "worker1", name=name), partial(rpc.get_actor, name)):
            with pytest.raises(ValueError, match="expected the name of an actor"):
                mesh.run(0, use)
    with pytest.raises(ValueError, match="expected a name with exist_ok"):
        mesh.run(0, lambda: rpc.remote("worker1", Made, exist_ok=True))
    with pytest.raises(ValueError, match="expected one worker for the name 'replay', got a group"):
        mesh.run(0, lambda: rpc.remote(rpc.group("worker*"), Made, name="replay"))


@rpc.actor
class Log:
    """Is made only when the gate is open."""

    def __init__(self, gate: Gate) -> None:
        gate.wait_inside()
        self.lines: list[int] = []

    def write(self, line: int) -> list[int]:
        self.lines.append(line)
        return list(self.lines)


def test_an_actor_that_is_being_made_has_its_name_and_its_calls_begin_in_order(mesh: Mesh) -> None:
    gate = Gate()
    mesh.run(0, lambda: rpc.remote("worker1", Log, (gate,), name="replay"))
    gate.await_entry()
    with pytest.raises(rpc.RpcError, match="is taken by Log on worker1"):
        mesh.run(2, make, "worker2")

    def write() -> Any:
        log = rpc.get_actor("replay", SOON)
        futures = [log.rpc_async().write(line) for line in range(20)]
        gate.open()
        return futures[-1].wait()

    assert mesh.run(2, write) == list(range(20))
    mesh.run(0, lambda: rpc.get_actor("replay").stop(SOON))
    mesh.run(2, make, "worker2")


# -- exist_ok --------------------------------------------------------------------------------


def test_of_many_makers_with_exist_ok_one_constructor_runs(mesh: Mesh) -> None:
    def share(number: int) -> Any:
        return make(WORKERS[number % 3], number, exist_ok=True).rpc_sync().get()

    futures = [mesh.submit(number % 3, share, number // 3) for number in range(24)]
    assert len({future.result(SOON) for future in futures}) == 1
    assert len(made) == 1
    assert sum(names_held(mesh)) == 1


def test_the_error_of_the_one_constructor_goes_to_all_makers(mesh: Mesh) -> None:
    gate = Gate()

    class Slow(Failing):
        def __init__(self) -> None:
            gate.wait_inside()
            super().__init__()

    def share(to: str) -> Any:
        return rpc.remote(to, Slow, name="replay", exist_ok=True)

    rrefs = [mesh.run(worker, share, worker) for worker in WORKERS]
    gate.open()
    for worker, rref in zip(WORKERS, rrefs, strict=True):
        with pytest.raises(KeyError, match="own error"):
            mesh.run(worker, rref.to_here)
    assert len(made) == 1


def test_a_maker_that_was_told_of_a_failed_actor_gets_its_error(mesh: Mesh) -> None:
    failed = mesh.run(0, lambda: rpc.remote("worker1", Failing, name="replay"))
    with pytest.raises(KeyError, match="own error"):
        mesh.run(0, failed.to_here)
    until(lambda: names_held(mesh) == [0, 0, 0])

    def asked(shares: bool | None) -> Any:
        return rpc.rpc_sync("worker1", claims.get_actor, ("replay", 1, shares))

    what, found = mesh.run(2, asked, True)
    assert "Failing on worker1" in what
    with pytest.raises(KeyError, match="own error"):
        mesh.run(2, found.to_here)
    assert mesh.run(2, asked, False) is None  # the name is free for others
    assert mesh.run(2, asked, None) is None
    mesh.run(2, make, "worker2", "next", exist_ok=True)
    assert mesh.run(0, get) == "next"


def test_an_actor_that_is_shared_while_others_stop_it_runs_or_was_stopped(mesh: Mesh) -> None:
    shared, ends = rpc.actor(Made, concurrency=1), list[Any]()

    def outcome_of(rref: Any) -> Any:
        try:
            return rref.rpc_sync().get()
        except rpc.RpcError as error:
            return error.executed, "was stopped by" in str(error)

    def share(worker: str) -> None:
        for _ in range(10):
            rref = rpc.remote(worker, shared, (7,), name="replay", exist_ok=True)
            ends.append(outcome_of(rref))

    def stop() -> None:
        for _ in range(10):
            rpc.get_actor("replay", SOON).stop(SOON)
            rpc.remote("worker0", shared, (7,), name="replay", exist_ok=True)

    futures = [mesh.submit(worker, share, worker) for worker in WORKERS]
    futures += [mesh.submit(worker, stop) for worker in WORKERS]
    for future in futures:
        future.result(SOON)
    assert set(ends) <= {7, (False, True)}
    assert sum(names_held(mesh)) == 1
    assert mesh.run_all(get) == [7, 7, 7]


# -- get_actor -------------------------------------------------------------------------------


def test_get_actor_says_that_there_is_none_in_time(mesh: Mesh) -> None:
    with pytest.raises(rpc.RpcTimeoutError, match=r"'replay' within 0.05 s, found none") as caught:
        mesh.run(0, rpc.get_actor, "replay", 0.05)
    assert caught.value.executed is False
    del caught  # its traceback has what was waited for
    until(lambda: not questions(), "nothing of the search is left on any worker", collect=True)


ended = threading.Event()


def search_long() -> None:
    try:
        rpc.get_actor("replay", timeout=1000)
    except rpc.RpcTimeoutError:
        ended.set()
        raise  # both ends have the same deadline, so this answer may be first


def test_get_actor_in_a_handler_waits_no_longer_than_its_caller(mesh: Mesh) -> None:
    with pytest.raises(rpc.RpcTimeoutError):
        mesh.run(0, lambda: rpc.rpc_sync("worker1", search_long, timeout=0.3))
    assert ended.wait(SOON)


def test_handlers_that_search_hold_up_no_others(mesh: Mesh) -> None:
    def search_often() -> list[Any]:
        return [rpc.rpc_async("worker1", get) for _ in range(40)]

    searches = mesh.run(0, search_often)
    mesh.run(2, lambda: rpc.rpc_sync("worker1", make, args=("worker1", 1)))
    assert mesh.run(0, rpc.wait_all, searches) == [1] * 40


def test_shutdown_ends_a_search(mesh: Mesh) -> None:
    search = mesh.submit("worker2", rpc.get_actor, "replay", timeout=1000)
    until(questions, "it searches")
    mesh.agent("worker2").close()
    with pytest.raises(rpc.NotInitializedError):
        search.result(SOON)


# -- workers that leave ----------------------------------------------------------------------


@pytest.mark.parametrize("owner", ["worker0", "worker1"])
def test_a_name_is_free_when_its_owner_leaves(mesh: Mesh, owner: str) -> None:
    mesh.run(2, make, owner)
    mesh.run(2, get)
    search = mesh.submit(2, lambda: (mesh.agent(owner).close(), make("worker2", "next"), get())[-1])
    assert search.result(SOON) == "next"


@pytest.mark.system
@pytest.mark.zrpc(faults=True)
def test_the_maker_learns_that_the_owner_was_lost_before_it_had_the_name(mesh: Mesh) -> None:
    with faults.cut(mesh, 0, 1):  # worker0, which grants names, does not hear of the claim
        future = mesh.submit(2, make, "worker1")
        until(questions, "it claims the name")
        mesh.agent("worker1").close()
    with pytest.raises(rpc.WorkerDied, match="worker1"):
        future.result(SOON)
    with pytest.raises(rpc.WorkerDied, match="worker1") as known:  # from the start
        mesh.run(2, make, "worker1")
    assert known.value.executed is False


@pytest.mark.zrpc(workers=4)
def test_names_outlive_all_workers_but_their_owner(mesh: Mesh) -> None:
    mesh.run(2, make, "worker1", 1, "lost")
    mesh.run(2, make, "worker3", 3, "kept")
    search = mesh.submit(3, get, "later")
    for gone in (0, 1):  # the first has granted the names
        mesh.agent(gone).close()
    assert mesh.run(2, get, "kept") == 3
    mesh.run(2, lambda: make("worker3", 4, "lost", exist_ok=True))  # waits until it is free
    assert mesh.run(2, get, "lost") == 4
    mesh.run(2, make, "worker2", 5, "later")
    assert search.result(SOON) == 5


@pytest.mark.system
@pytest.mark.zrpc(workers=4)
@pytest.mark.parametrize("victim", [0, 3])  # which grants the names, or makes the actors
def test_a_loss_in_the_midst_of_claims_leaves_no_name_without_an_actor(
    mesh: Mesh, victim: int
) -> None:
    def make_many(maker: int) -> None:
        for number in range(300):
            make(f"worker{1 + number % 2}", number, f"by{maker}/{number}")

    making = {maker: mesh.submit(maker, make_many, maker) for maker in (2, 3)}
    mesh.run(1, get, "by3/5")
    mesh.agent(victim).close()
    for maker in making.keys() - {victim}:
        making[maker].result(SOON)
    for number in range(0, 100, 10):
        shared = mesh.run(1, lambda n=number: make("worker1", -1, f"by3/{n}", exist_ok=True))
        assert mesh.run(1, shared.rpc_sync().get) in (number, -1)
