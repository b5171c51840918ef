"""A handler begins when the owners know of the RRefs in its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import zrpc
from tests.support.gates import Gate
from tests.support.observed import calls_to
from tests.support.waiting import SOON, until
from zrpc.services.rref.messages import Fork, GloballyUniqueId, ReferenceMessage, Verb
from zrpc.services.rref.protocol import References
from zrpc.services.rref.service import RRefService
from zrpc.testing import Mesh, faults

pytestmark = pytest.mark.zrpc(workers=3, faults=True)


class Asked:
    def confirmed(self, rref: zrpc.RRef[Any]) -> bool:
        return rref.confirmed_by_owner()


def confirmed(rref: zrpc.RRef[Any]) -> bool:
    return rref.confirmed_by_owner()


async def confirmed_later(rref: zrpc.RRef[Any]) -> bool:
    return rref.confirmed_by_owner()


def by_method(to: str, rref: zrpc.RRef[Any]) -> bool:
    asked = zrpc.remote(to, Asked)
    return bool(asked.rpc_sync().confirmed(rref))


WAYS: list[Callable[[str, zrpc.RRef[Any]], Any]] = [
    lambda to, rref: zrpc.rpc_sync(to, confirmed, args=(rref,)),
    lambda to, rref: zrpc.rpc_async(to, confirmed_later, args=(rref,)).wait(),
    lambda to, rref: zrpc.remote(to, confirmed, args=(rref,)).to_here(),
    by_method,
]


@pytest.fixture
def rref(mesh: Mesh) -> Iterator[zrpc.RRef[Any]]:
    """An RRef of worker0 to a value of worker2; the test itself is worker0."""
    with mesh.agent(0).as_current():
        rref = zrpc.remote("worker2", dict)
        rref.to_here()
        zrpc.rpc_sync("worker1", zrpc.rpc_sync, ("worker2", max, (1, 2)))  # opens connections
        yield rref


def let_it_be_read(future: zrpc.Future[Any]) -> None:
    """Waits until worker1 has read a call, which does not begin: other handlers run meanwhile."""
    zrpc.rpc_sync("worker1", max, (1, 2))
    assert not future.done()


@pytest.mark.parametrize("way", WAYS)
def test_a_handler_begins_when_its_rref_is_confirmed(
    mesh: Mesh, rref: zrpc.RRef[Any], way: Any
) -> None:
    with faults.cut(mesh, 1, 2):
        answer = mesh.submit(0, way, "worker1", rref)
        until(lambda: calls_to(mesh, 1).calls_in_flight)
        let_it_be_read(answer)
    assert answer.result(SOON) is True


def test_a_handler_whose_rrefs_owner_dies_begins_nevertheless(
    mesh: Mesh, rref: zrpc.RRef[Any]
) -> None:
    with faults.drop(mesh, 1, 2, None) as fault:
        future = zrpc.rpc_async("worker1", confirmed, args=(rref,))
        until(lambda: fault.happened, "worker1 tells the owner of its fork")
        mesh.agent(2).close()
        assert future.wait() is False


def test_a_handler_begins_in_the_end_if_a_message_is_lost(
    mesh: Mesh, rref: zrpc.RRef[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zrpc.services.rref.service._LISTING_SECONDS", 0.05)
    with faults.cut(mesh, 1, 2):
        assert zrpc.rpc_sync("worker1", confirmed, args=(rref,)) is False


def test_a_handler_that_is_cancelled_meanwhile_never_begins(
    mesh: Mesh, rref: zrpc.RRef[Any]
) -> None:
    begun = Gate()
    begun.open()
    with faults.cut(mesh, 1, 2):
        future = zrpc.rpc_async("worker1", begun.wait_inside, args=(rref,))
        let_it_be_read(future)
        assert future.cancel()
        until(lambda: not len(mesh.agent(1).callee.requests), "the request is dropped")
    # What comes later runs later.
    assert zrpc.rpc_sync("worker1", confirmed, args=(rref,)) is True
    assert not begun.entered.acquire(blocking=False)


# -- the rules -------------------------------------------------------------------------------

OWNER, SENDER, RECEIVER = 0, 1, 2


def receiver_of(*locals_: int) -> tuple[References, list[GloballyUniqueId]]:
    """Returns a worker that has received a fork of each of these values, and the forks' ids."""
    references = References(RECEIVER)
    ids = []
    for local in locals_:
        fork_id = GloballyUniqueId(SENDER, 100 + local)
        parent = GloballyUniqueId(SENDER, 200 + local)
        references.receive(Fork(GloballyUniqueId(OWNER, local), fork_id, OWNER, parent), SENDER)
        ids.append(fork_id)
    return references, ids


def test_it_begins_when_the_last_fork_is_listed() -> None:
    references, ids = receiver_of(1, 2)
    begun: list[str] = []
    references.begin_when_listed(ids, lambda: begun.append("it"), deadline=5)
    for serial, fork_id in enumerate(ids):
        assert references.ready == []
        message = ReferenceMessage(Verb.ADDED, serial, GloballyUniqueId(OWNER, 1), fork_id)
        references.handle(OWNER, message)
    [begin] = references.ready
    begin()
    assert begun == ["it"]


def test_it_begins_at_once_if_all_forks_are_listed() -> None:
    references, _ = receiver_of()
    references.begin_when_listed([], begin := lambda: None, deadline=5)
    assert references.ready == [begin]


@pytest.mark.parametrize(
    "event", [lambda r: r.on_member_lost(OWNER), lambda r: r.expire(5.0)], ids=["loss", "deadline"]
)
def test_it_begins_once_if_the_owner_is_lost_or_the_deadline_has_passed(event: Any) -> None:
    references, ids = receiver_of(1)
    references.begin_when_listed(ids, begin := lambda: None, deadline=5)
    references.expire(4.9)
    assert references.ready == []
    event(references)
    event(references)
    references.on_member_lost(OWNER)
    assert references.ready == [begin]


def test_the_end_of_a_fork_that_was_lost_is_told_again(mesh: Mesh) -> None:
    """As soon as a later message shows that one is missing."""
    owned = mesh.agent(2).service(RRefService).stats
    with mesh.agent(0).as_current():
        rref = zrpc.remote("worker2", dict)
        rref.to_here()
        with faults.drop(mesh, 0, 2) as fault:
            del rref
            until(lambda: fault.happened)
        zrpc.remote("worker2", list).to_here()
        until(lambda: not owned()["rrefs_owned"], lambda: str(owned()))
