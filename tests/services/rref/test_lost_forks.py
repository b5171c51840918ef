"""RRefs in calls and answers that are lost with a connection: their values are freed in the end."""

from __future__ import annotations

import pytest

import zrpc
from tests.support.observed import ask_often, stats_of
from tests.support.targets import echo
from tests.support.waiting import until
from zrpc.services.rref.messages import Fork, GloballyUniqueId, ReferenceMessage, Verb
from zrpc.services.rref.protocol import References
from zrpc.services.rref.service import RRefService
from zrpc.testing import Mesh, faults

pytestmark = pytest.mark.zrpc(workers=3, faults=True)

# Makes the values in these tests.
OWNER = 1


def new_rrefs(count: int) -> list[zrpc.RRef[str]]:
    return [zrpc.RRef(f"value {number}") for number in range(count)]


def is_empty(mesh: Mesh) -> bool:
    counts = [stats_of(mesh, rank) for rank in range(len(mesh))]
    idle = all(mesh.agent(rank).service(RRefService).idle() for rank in range(len(mesh)))
    return idle and not any(each.rrefs_owned or each.rrefs_held for each in counts)


@pytest.mark.system
@pytest.mark.parametrize(("sender", "to"), [(0, OWNER), (0, 2), (OWNER, 0), (OWNER, 2)])
def test_an_rref_in_a_lost_call_keeps_its_value_no_longer(mesh: Mesh, sender: int, to: int) -> None:
    ask_often(mesh)
    with mesh.agent(sender).as_current():
        assert zrpc.rpc_sync(to, echo, (1,)) == 1
        rref = zrpc.remote(OWNER, dict)
        assert rref.to_here() == {}
        with faults.drop(mesh, sender, to), pytest.raises(zrpc.RpcError, match="is lost"):
            zrpc.rpc_sync(to, echo, (rref,), timeout=0)
        assert zrpc.rpc_sync(to, echo, (rref,)).to_here() == {}
        del rref
    until(lambda: is_empty(mesh))


@pytest.mark.system
def test_rrefs_in_a_lost_answer_keep_their_values_no_longer(mesh: Mesh) -> None:
    ask_often(mesh)
    with mesh.agent(0).as_current():
        kept = zrpc.rpc_sync(OWNER, new_rrefs, (3,))
        with faults.drop(mesh, OWNER, 0), pytest.raises(zrpc.RpcError, match="is lost"):
            zrpc.rpc_sync(OWNER, new_rrefs, (900,), timeout=0)
        until(lambda: stats_of(mesh, OWNER).rrefs_owned == 3)
        assert [rref.to_here() for rref in kept] == ["value 0", "value 1", "value 2"]
        del kept
    until(lambda: is_empty(mesh))


# -- the rules -------------------------------------------------------------------------------

GIVER, USER = 0, 1


def exchange(giver: References, user: References) -> list[Verb]:
    """Delivers what both have to say, until they say no more; returns what was said."""
    said = []
    while giver.outgoing or user.outgoing:
        for machine, other, rank in ((giver, user, GIVER), (user, giver, USER)):
            for _, message in machine.outgoing:
                said.append(message.verb)
                other.handle(rank, message)
            machine.outgoing.clear()
            other.look()
    return said


def handed_out() -> tuple[References, References, Fork]:
    """An owner that has handed on its only handle, and the user, to which it is in flight."""
    giver, user = References(GIVER), References(USER)
    fork = Fork(GloballyUniqueId(GIVER, 1), GloballyUniqueId(GIVER, 2), GIVER)
    giver.fork(fork, USER)
    return giver, user, fork


def test_a_fork_that_comes_late_lives() -> None:
    """It was asked about since other messages were lost."""
    giver, user, fork = handed_out()
    user.on_messages_lost(GIVER)
    assert exchange(giver, user) == [Verb.RESEND, Verb.CHECK]
    assert user.awaited == {GIVER}
    user.on_answered(GIVER)
    user.receive(fork, GIVER)
    for _ in range(5):
        user.on_answered(GIVER)
    assert exchange(giver, user) == []
    assert user.awaited == set()
    assert giver.freed == []
    assert sum(user.sizes()) == 1


def test_a_fork_is_not_lost_before_some_answers() -> None:
    giver, user, fork = handed_out()
    user.on_messages_lost(GIVER)
    exchange(giver, user)
    for _ in range(2):
        user.on_answered(GIVER)
        assert exchange(giver, user) == []
    user.on_answered(USER)  # by somebody else
    assert exchange(giver, user) == []
    user.on_answered(GIVER)
    assert exchange(giver, user)[0] == Verb.DELETE
    assert giver.freed == [fork.rref_id]
    assert (sum(giver.sizes()), sum(user.sizes()), user.awaited) == (0, 0, set())


def test_a_fork_that_ended_long_before_it_is_asked_about_ends_once() -> None:
    giver, user, fork = handed_out()
    user.receive(fork, GIVER)
    user.drop(fork.fork_id)
    for number in range(100):  # which the user remembers instead
        other = fork._replace(fork_id=GloballyUniqueId(GIVER, 10 + number))
        giver.fork(other, USER)
        user.receive(other, GIVER)
        user.drop(other.fork_id)
        user.look()
    late = [message for _, message in user.outgoing]
    assert (late[0].verb, late[0].fork_id) == (Verb.DELETE, fork.fork_id)
    user.outgoing.clear()
    user.on_messages_lost(GIVER)
    exchange(giver, user)
    for _ in range(3):
        user.on_answered(GIVER)
    exchange(giver, user)
    for message in late:
        giver.handle(USER, message)
        giver.look()
    assert giver.freed == [fork.rref_id]
    assert sum(giver.sizes()) == 0


def test_what_a_lost_worker_asked_about_is_forgotten() -> None:
    user = References(USER)
    ids = GloballyUniqueId(GIVER, 1), GloballyUniqueId(GIVER, 2)
    user.handle(GIVER, ReferenceMessage(Verb.CHECK, 0, *ids))
    user.on_member_lost(GIVER)
    assert user.awaited == set()
