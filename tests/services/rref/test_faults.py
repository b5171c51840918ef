"""RRefs in messages that are held up or lost, and between workers that lose each other."""

from __future__ import annotations

from typing import Any

import pytest

import zrpc
from tests.support.gates import Gate
from tests.support.observed import ask_often, calls_to, stats_of
from tests.support.parting import leaving_at_once, lose_each_other
from tests.support.targets import echo
from tests.support.waiting import SOON, until
from zrpc.services.rref.service import RRefService
from zrpc.testing import Mesh, faults

pytestmark = pytest.mark.zrpc(workers=3, faults=True)


def is_empty(mesh: Mesh) -> bool:
    counts = [stats_of(mesh, rank) for rank in range(len(mesh))]
    idle = all(mesh.agent(rank).service(RRefService).idle() for rank in range(len(mesh)))
    return idle and not any(each.rrefs_owned or each.rrefs_held for each in counts)


# -- a handler begins when the owners know of the RRefs in its arguments ---------------------------


class Asked:
    def confirmed(self, rref: zrpc.RRef[Any]) -> bool:
        return rref.confirmed_by_owner()


def confirmed(rref: zrpc.RRef[Any]) -> bool:
    return rref.confirmed_by_owner()


async def confirmed_later(rref: zrpc.RRef[Any]) -> bool:
    return rref.confirmed_by_owner()


WAYS: list[Any] = [
    lambda rref: zrpc.rpc_sync("worker1", confirmed, args=(rref,)),
    lambda rref: zrpc.rpc_async("worker1", confirmed_later, args=(rref,)).wait(),
    lambda rref: zrpc.remote("worker1", confirmed, args=(rref,)).to_here(),
    lambda rref: zrpc.remote("worker1", Asked).rpc_sync().confirmed(rref),
]


@pytest.fixture
def rref(caller: Mesh) -> zrpc.RRef[Any]:
    """An RRef of worker0 to a value of worker2; the test itself is worker0."""
    rref = zrpc.remote("worker2", dict)
    rref.to_here()
    zrpc.rpc_sync("worker1", zrpc.rpc_sync, ("worker2", max, (1, 2)))  # opens connections
    return rref


def let_it_be_read(future: Any) -> None:
    """Waits until worker1 has read a call, which does not begin: other handlers run meanwhile."""
    zrpc.rpc_sync("worker1", max, (1, 2))
    assert not future.done()


def test_a_handler_begins_when_its_rref_is_confirmed(caller: Mesh, rref: zrpc.RRef[Any]) -> None:
    for way in WAYS:
        with faults.cut(caller, 1, 2):
            answer = caller.submit(0, way, rref)
            until(lambda: calls_to(caller, 1).calls_in_flight)
            let_it_be_read(answer)
        assert answer.result(SOON) is True


def test_a_handler_that_is_cancelled_meanwhile_never_begins(
    caller: Mesh, rref: zrpc.RRef[Any]
) -> None:
    begun = Gate()
    begun.open()
    with faults.cut(caller, 1, 2):
        future = zrpc.rpc_async("worker1", begun.wait_inside, args=(rref,))
        let_it_be_read(future)
        assert future.cancel()
        until(lambda: not len(caller.agent(1).callee.requests), "the request is dropped")
    # What comes later runs later.
    assert zrpc.rpc_sync("worker1", confirmed, args=(rref,)) is True
    assert not begun.entered.acquire(blocking=False)


# -- messages that are lost ------------------------------------------------------------------------


@pytest.mark.system
def test_the_end_of_a_fork_that_was_lost_is_told_again(caller: Mesh) -> None:
    """As soon as a later message shows that one is missing."""
    rref = zrpc.remote("worker2", dict)
    rref.to_here()
    with faults.drop(caller, 0, 2) as fault:
        del rref
        until(lambda: fault.happened)
    zrpc.remote("worker2", list).to_here()
    until(lambda: not stats_of(caller, 2).rrefs_owned)


@pytest.mark.system
def test_an_rref_in_a_lost_call_keeps_its_value_no_longer(mesh: Mesh) -> None:
    owner = 1
    ask_often(mesh)
    for sender, to in ((0, owner), (0, 2), (owner, 0), (owner, 2)):
        with mesh.agent(sender).as_current():
            assert zrpc.rpc_sync(to, echo, (1,)) == 1
            rref = zrpc.remote(owner, dict)
            assert rref.to_here() == {}
            with faults.drop(mesh, sender, to), pytest.raises(zrpc.RpcError, match="is lost"):
                zrpc.rpc_sync(to, echo, (rref,), timeout=0)
            assert zrpc.rpc_sync(to, echo, (rref,)).to_here() == {}
            del rref
        until(lambda: is_empty(mesh))


def new_rrefs(count: int) -> list[zrpc.RRef[str]]:
    return [zrpc.RRef(f"value {number}") for number in range(count)]


@pytest.mark.system
def test_rrefs_in_a_lost_answer_keep_their_values_no_longer(caller: Mesh) -> None:
    kept = zrpc.rpc_sync(1, new_rrefs, (3,))
    with faults.drop(caller, 1, 0) as fault:
        future = zrpc.rpc_async(1, new_rrefs, (900,), timeout=0)
        until(lambda: fault.happened)
    ask_often(caller)  # from now on: what is dropped must be no answer to a question
    with pytest.raises(zrpc.RpcError, match="is lost"):
        future.wait()
    until(lambda: stats_of(caller, 1).rrefs_owned == 3)
    assert [rref.to_here() for rref in kept] == ["value 0", "value 1", "value 2"]
    del kept
    until(lambda: is_empty(caller))


# -- an owner that has lost a worker, while others still reach both and bring its RRefs ------------

# Without heartbeats, nobody decides which of the two must go.
OPTIONS = {"heartbeat_timeout": 0, "rpc_timeout": 10.0}
parted = pytest.mark.zrpc(workers=3, timeout=30, faults=True, options=OPTIONS)


def fetch(rref: zrpc.RRef[Any]) -> Any:
    return rref.to_here()


def bring(rref: zrpc.RRef[Any]) -> Any:
    """Gives an RRef to its owner."""
    return zrpc.rpc_sync(rref.owner(), fetch, (rref,))


@parted
def test_a_value_whose_creator_is_lost_before_its_call_has_arrived(mesh: Mesh) -> None:
    with leaving_at_once(mesh), mesh.agent(1).as_current():
        zrpc.rpc_sync("worker0", echo, (1,))
        with faults.drop(mesh, 1, 0):
            rref = zrpc.remote("worker0", list)
        lose_each_other(mesh, 0, 1)
        for use in (bring, fetch):
            with pytest.raises(zrpc.OwnerDied, match=r"worker1 .*is gone.* it had asked for the"):
                zrpc.rpc_sync("worker2", use, (rref,))


@parted
def test_a_value_that_was_freed_with_the_loss_of_its_user(mesh: Mesh) -> None:
    with leaving_at_once(mesh), mesh.agent(1).as_current():
        rref = zrpc.rpc_sync("worker0", zrpc.RRef, (5,))
        lose_each_other(mesh, 0, 1)
        until(lambda: not stats_of(mesh, 0).rrefs_owned)
        with pytest.raises(zrpc.RpcError, match="no longer here"):
            zrpc.rpc_sync("worker2", bring, (rref,))
