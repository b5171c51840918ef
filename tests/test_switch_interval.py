"""How long threads may keep the interpreter's lock: who sets that, and who puts it back."""

from __future__ import annotations

import os
import sys
import threading

import pytest
from torch.distributed import HashStore

import zrpc
from zrpc.agent import Agent
from zrpc.joining import join_mesh
from zrpc.switch_interval import SwitchInterval
from zrpc.testing import local_mesh

pytestmark = pytest.mark.usefixtures("no_leaks")

BEFORE = 0.004


@pytest.fixture(autouse=True)
def before():
    """The interval at the start of a test."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(BEFORE)
    yield
    sys.setswitchinterval(usual)


@pytest.fixture
def asking():
    """Makes some that ask; the test ends with none."""
    made = []

    def ask(seconds):
        made.append(SwitchInterval(seconds))
        made[-1].ask()
        return made[-1]

    yield ask
    for each in made:
        each.give_back()


def current():
    return pytest.approx(sys.getswitchinterval(), abs=1e-9)


def test_it_is_set_and_put_back(asking):
    one = asking(0.001)
    assert current() == 0.001
    one.give_back()
    assert current() == BEFORE


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
def test_of_several_the_smallest_holds(asking, order):
    seconds = [0.003, 0.001, 0.002]
    all_of_them = [asking(each) for each in seconds]
    assert current() == 0.001
    for ended, which in enumerate(order, start=1):
        all_of_them[which].give_back()
        left = [seconds[each] for each in order[ended:]]
        assert current() == min([BEFORE, *left])


def test_it_never_gets_longer(asking):
    one = asking(0.5)
    assert current() == BEFORE
    one.give_back()
    assert current() == BEFORE


def test_zero_leaves_it_alone(asking):
    one = asking(0)
    assert current() == BEFORE
    other = asking(0.001)
    one.give_back()
    assert current() == 0.001
    other.give_back()
    assert current() == BEFORE


def test_giving_back_twice_or_without_asking_is_nothing(asking):
    SwitchInterval(0.001).give_back()
    one, _ = asking(0.001), asking(0.002)
    one.give_back()
    sys.setswitchinterval(0.003)
    one.give_back()
    assert current() == 0.003


def test_asking_twice_counts_once(asking):
    one = asking(0.001)
    one.ask()
    one.give_back()
    assert current() == BEFORE


def test_what_somebody_else_has_set_meanwhile_stays(asking):
    one, other = asking(0.001), asking(0.002)
    sys.setswitchinterval(0.003)
    one.give_back()
    assert current() == 0.003
    other.give_back()
    assert current() == 0.003


def test_what_somebody_else_has_set_meanwhile_is_put_back_after_one_more(asking):
    one = asking(0.001)
    sys.setswitchinterval(0.003)
    other = asking(0.002)
    assert current() == 0.001
    one.give_back()
    assert current() == 0.002
    other.give_back()
    assert current() == 0.003


def test_it_begins_anew_after_the_last(asking):
    asking(0.001).give_back()
    sys.setswitchinterval(0.002)
    one = asking(0.001)
    assert current() == 0.001
    one.give_back()
    assert current() == 0.002


@pytest.mark.parametrize("microseconds", [0, 1, 3, 57, 299, 1001, 4999, 100_001])
def test_what_was_before_is_put_back_to_the_microsecond(asking, microseconds):
    sys.setswitchinterval((microseconds + 0.5) * 1e-6)
    exactly = sys.getswitchinterval()
    assert round(exactly * 1e6) == microseconds
    for _ in range(3):
        asking(0.001).give_back()
        assert sys.getswitchinterval() == exactly


def test_less_than_a_microsecond_is_as_short_as_can_be(asking):
    one = asking(1e-9)
    assert sys.getswitchinterval() == 0
    one.give_back()
    assert current() == BEFORE


def test_several_threads_at_once():
    start = threading.Barrier(4)

    def ask_and_give_back():
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_has_what_was_before(asking):
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


def test_a_mesh_sets_it_and_puts_it_back():
    with local_mesh(2) as mesh:
        assert current() == 0.001
        assert mesh.run(0, zrpc.rpc_sync, 1, sys.getswitchinterval) == pytest.approx(0.001)
    assert current() == BEFORE


def test_a_mesh_with_an_interval_of_its_own():
    with local_mesh(2, options={"switch_interval": 0.002}):
        assert current() == 0.002
        with local_mesh(2, options={"switch_interval": 0.0015}):
            assert current() == 0.0015
        assert current() == 0.002
    assert current() == BEFORE


def test_a_mesh_that_leaves_it_alone():
    with local_mesh(2, options={"switch_interval": 0}):
        assert current() == BEFORE
    assert current() == BEFORE


def test_the_last_worker_to_leave_puts_it_back():
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


def fails(agent):
    raise Failure


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
def test_a_start_that_fails_in_a_layer(elastic):
    mesh = {"rank": None, "world_size": None} if elastic else {"rank": 0, "world_size": 1}
    with pytest.raises(Failure):
        join_mesh("worker", store=HashStore(), layers=[fails], **mesh)
    assert current() == BEFORE


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
def test_a_start_that_fails_when_the_agent_serves(elastic, monkeypatch):
    def start(threads):
        assert current() == 0.001
        raise Failure

    monkeypatch.setattr("zrpc.io_threads.IoThreads.start", start)
    mesh = {"rank": None, "world_size": None} if elastic else {"rank": 0, "world_size": 1}
    with pytest.raises(Failure):
        join_mesh("worker", store=HashStore(), **mesh)
    assert current() == BEFORE


def test_a_worker_that_is_not_admitted(monkeypatch):
    def await_admission(*_):
        assert current() == 0.001
        raise zrpc.RendezvousError("nobody came")

    monkeypatch.setattr("zrpc.elastic.ElasticLayer.await_admission", await_admission)
    with pytest.raises(zrpc.RendezvousError, match="nobody came"):
        join_mesh("worker", rank=None, world_size=None, store=HashStore())
    assert current() == BEFORE


def test_an_end_that_fails_puts_it_back(monkeypatch):
    close = Agent._close

    def fails_at_the_end(agent):
        close(agent)
        raise Failure

    monkeypatch.setattr(Agent, "_close", fails_at_the_end)
    agent = join_mesh("worker", rank=0, world_size=1, store=HashStore())
    assert current() == 0.001
    with pytest.raises(Failure):
        agent.shutdown(graceful=False)
    assert current() == BEFORE
