"""How long threads may keep the interpreter's lock: when it is set, and when restored."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

import zrpc
from zrpc.agent.agent import Agent
from zrpc.agent.closing import Closing
from zrpc.bootstrap import join_mesh
from zrpc.runtime.switch_interval import SwitchInterval
from zrpc.testing import local_mesh

pytestmark = pytest.mark.usefixtures("no_leaks")

BEFORE = 0.004


@pytest.fixture(autouse=True)
def before() -> Iterator[None]:
    """Sets the interval at the start of a test."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(BEFORE)
    yield
    sys.setswitchinterval(usual)


@pytest.fixture
def asking() -> Iterator[Callable[[float], SwitchInterval]]:
    """Makes intervals that ask; the test ends with none."""
    made = []

    def ask(seconds: float) -> SwitchInterval:
        made.append(SwitchInterval(seconds))
        made[-1].ask()
        return made[-1]

    yield ask
    for each in made:
        each.give_back()


def current() -> Any:
    return pytest.approx(sys.getswitchinterval(), abs=1e-9)


def test_the_interval_is_set_and_restored(asking: Callable[[float], SwitchInterval]) -> None:
    one = asking(0.001)
    assert current() == 0.001
    one.give_back()
    assert current() == BEFORE


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
def test_the_smallest_of_several_holds(
    asking: Callable[[float], SwitchInterval], order: tuple[int, ...]
) -> None:
    seconds = [0.003, 0.001, 0.002]
    all_of_them = [asking(each) for each in seconds]
    assert current() == 0.001
    for ended, which in enumerate(order, start=1):
        all_of_them[which].give_back()
        left = [seconds[each] for each in order[ended:]]
        assert current() == min([BEFORE, *left])


def test_the_interval_never_gets_longer(asking: Callable[[float], SwitchInterval]) -> None:
    one = asking(0.5)
    assert current() == BEFORE
    one.give_back()
    assert current() == BEFORE


def test_zero_changes_nothing(asking: Callable[[float], SwitchInterval]) -> None:
    one = asking(0)
    assert current() == BEFORE
    other = asking(0.001)
    one.give_back()
    assert current() == 0.001
    other.give_back()
    assert current() == BEFORE


def test_give_back_is_idempotent(
    asking: Callable[[float], SwitchInterval],
) -> None:
    SwitchInterval(0.001).give_back()
    one, _ = asking(0.001), asking(0.002)
    one.give_back()
    sys.setswitchinterval(0.003)
    one.give_back()
    assert current() == 0.003


def test_asking_twice_counts_once(asking: Callable[[float], SwitchInterval]) -> None:
    one = asking(0.001)
    one.ask()
    one.give_back()
    assert current() == BEFORE


def test_an_interval_set_by_other_code_stays(
    asking: Callable[[float], SwitchInterval],
) -> None:
    one, other = asking(0.001), asking(0.002)
    sys.setswitchinterval(0.003)
    one.give_back()
    assert current() == 0.003
    other.give_back()
    assert current() == 0.003


def test_an_interval_set_by_other_code_is_restored_after_one_more(
    asking: Callable[[float], SwitchInterval],
) -> None:
    one = asking(0.001)
    sys.setswitchinterval(0.003)
    other = asking(0.002)
    assert current() == 0.001
    one.give_back()
    assert current() == 0.002
    other.give_back()
    assert current() == 0.003


def test_the_previous_interval_is_read_again_after_the_last(
    asking: Callable[[float], SwitchInterval],
) -> None:
    asking(0.001).give_back()
    sys.setswitchinterval(0.002)
    one = asking(0.001)
    assert current() == 0.001
    one.give_back()
    assert current() == 0.002


@pytest.mark.parametrize("microseconds", [0, 1, 3, 57, 299, 1001, 4999, 100_001])
def test_the_previous_interval_is_restored_to_the_microsecond(
    asking: Callable[[float], SwitchInterval], microseconds: int
) -> None:
    sys.setswitchinterval((microseconds + 0.5) * 1e-6)
    exactly = sys.getswitchinterval()
    assert round(exactly * 1e6) == microseconds
    for _ in range(3):
        asking(0.001).give_back()
        assert sys.getswitchinterval() == exactly


def test_less_than_a_microsecond_is_the_shortest_interval(
    asking: Callable[[float], SwitchInterval],
) -> None:
    one = asking(1e-9)
    assert sys.getswitchinterval() == 0
    one.give_back()
    assert current() == BEFORE


def test_several_threads_ask_at_once() -> None:
    start = threading.Barrier(4)

    def ask_and_give_back() -> None:
        start.wait(10)
        for _ in range(100):
            one = SwitchInterval(0.001)
            one.ask()
            assert sys.getswitchinterval() < BEFORE
            one.give_back()
        ends.append(True)

    ends: list[bool] = []
    threads = [threading.Thread(target=ask_and_give_back) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(ends) == 4
    assert current() == BEFORE


@pytest.mark.system
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_has_the_previous_interval(
    asking: Callable[[float], SwitchInterval],
) -> None:
    one = asking(0.001)
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 2 if sys.getswitchinterval() != pytest.approx(BEFORE) else 0
            one.give_back()
            code = code or 3 * (sys.getswitchinterval() != pytest.approx(BEFORE))
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert current() == 0.001


# -- of agents -------------------------------------------------------------------------------


def test_a_mesh_sets_and_restores_the_interval() -> None:
    with local_mesh(2) as mesh:
        assert current() == 0.001
        assert mesh.run(0, zrpc.rpc_sync, 1, sys.getswitchinterval) == pytest.approx(0.001)
    assert current() == BEFORE


def test_a_mesh_with_an_interval_of_its_own() -> None:
    with local_mesh(2, options={"switch_interval": 0.002}):
        assert current() == 0.002
        with local_mesh(2, options={"switch_interval": 0.0015}):
            assert current() == 0.0015
        assert current() == 0.002
    assert current() == BEFORE


def test_a_mesh_that_leaves_the_interval_alone() -> None:
    with local_mesh(2, options={"switch_interval": 0}):
        assert current() == BEFORE
    assert current() == BEFORE


def test_the_last_worker_to_leave_restores_the_interval() -> None:
    with local_mesh(2) as mesh:
        mesh.agent(0).shutdown(graceful=False)
        assert current() == 0.001
        mesh.agent(1).shutdown(graceful=False)
        assert current() == BEFORE
        sys.setswitchinterval(0.002)
        mesh.agent(1).close()
        assert current() == 0.002


class Failure(Exception):
    pass


def fails(agent: Agent) -> None:
    raise Failure


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
def test_a_start_that_fails_in_a_layer_restores_the_interval(elastic: bool) -> None:
    mesh = {"rank": None, "world_size": None} if elastic else {"rank": 0, "world_size": 1}
    with pytest.raises(Failure):
        join_mesh("worker", store=HashStore(), services=[fails], **mesh)
    assert current() == BEFORE


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
def test_a_start_that_fails_when_the_agent_serves_restores_the_interval(
    elastic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(threads: Any) -> None:
        assert current() == 0.001
        raise Failure

    monkeypatch.setattr("zrpc.runtime.leader_follower.LeaderFollower.start", start)
    mesh = {"rank": None, "world_size": None} if elastic else {"rank": 0, "world_size": 1}
    with pytest.raises(Failure):
        join_mesh("worker", store=HashStore(), **mesh)
    assert current() == BEFORE


def test_a_worker_that_is_not_admitted_restores_the_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def await_admission(*_: Any) -> None:
        assert current() == 0.001
        raise zrpc.RendezvousError("nobody came")

    monkeypatch.setattr(
        "zrpc.services.elastic.service.ElasticMembership.await_admission", await_admission
    )
    with pytest.raises(zrpc.RendezvousError, match="nobody came"):
        join_mesh("worker", rank=None, world_size=None, store=HashStore())
    assert current() == BEFORE


def test_a_shutdown_that_fails_restores_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    close = Closing._close_network

    def fails_at_the_end(closing: Closing) -> None:
        close(closing)
        raise Failure

    monkeypatch.setattr(Closing, "_close_network", fails_at_the_end)
    agent = join_mesh("worker", rank=0, world_size=1, store=HashStore())
    assert current() == 0.001
    with pytest.raises(Failure):
        agent.shutdown(graceful=False)
    assert current() == BEFORE
