"""Which workers are in the mesh, and which are gone."""

from __future__ import annotations

import pytest

from tests.support.records import peer_record
from zrpc.errors import RpcError
from zrpc.membership.view import Membership
from zrpc.membership.worker_info import WorkerInfo


@pytest.fixture
def members() -> Membership:
    return Membership([peer_record(rank) for rank in range(4)], own_id=1)


def test_find(members: Membership) -> None:
    # A call to a lost one fails with WorkerDied, which is clearer than "no such worker".
    for lose in (lambda _: None, members.mark_lost):
        lose(2)
        for to in ("worker2", 2, WorkerInfo("worker2", 2), True + 1):
            assert members.find(to) == WorkerInfo("worker2", 2)


def test_a_destination_that_does_not_exist(members: Membership) -> None:
    infos = (WorkerInfo("worker2", 3), WorkerInfo("other", 9))
    for to in ("worker4", "", "Worker2", -1, 4, 99, *infos):
        with pytest.raises(RpcError, match="could not find destination") as caught:
            members.find(to)
        assert repr(to) in str(caught.value)
        assert "worker0, worker1, worker2, worker3" in str(caught.value)
    for other in (None, 1.0, b"worker1", ["worker1"], object(), True, False):
        with pytest.raises(ValueError, match=r"from name .*expected a name, a rank"):
            members.find(other)  # type: ignore[arg-type]


def test_an_error_says_which_workers_there_are_and_which_may_come() -> None:
    for records, text in (
        ([peer_record(rank) for rank in range(64)], "worker7 and 56 more"),
        # A worker that was started again does not know one that is gone.
        (
            [peer_record(rank, world_size=3) for rank in (0, 2)],
            "1 other is gone, and not started again so far",
        ),
    ):
        with pytest.raises(RpcError, match=text):
            Membership(records, own_id=0).find("nobody")


def test_same_main() -> None:
    members = Membership([peer_record(0), peer_record(1), peer_record(2, main="other")], own_id=0)
    assert [members.same_main[rank] for rank in range(3)] == [True, True, False]
    text = [("main", "a"), ("main", "b"), ("other", "a"), ("other", "b"), ("other", "")]
    records = [peer_record(i, main=main, main_digest=text) for i, (main, text) in enumerate(text)]
    members = Membership(records, own_id=0)
    assert [members.same_main[rank] for rank in range(5)] == [True, True, True, False, False]


def test_shared_host() -> None:
    of_none = peer_record(3, directory="")
    records = [peer_record(0), peer_record(1), peer_record(2, host_key="elsewhere"), of_none]
    found = [Membership(records, 0).shares_host(rank) for rank in range(4)]
    assert found == [True, True, False, False]
    assert not Membership(records, 3).shares_host(3)


def test_routing_ids_are_those_of_members_until_they_are_lost(members: Membership) -> None:
    ids = [peer_record(rank).identity for rank in range(4)]
    assert [*map(members.member_of, ids)] == [*map(members.introduced_as, ids)] == [0, 1, 2, 3]
    for _ in range(2):
        members.mark_lost(2)
        assert members.lost == {2}
        assert members.living == [0, 1, 3]
        assert [*map(members.member_of, ids)] == [0, 1, None, 3]
        assert members.introduced_as(ids[2]) == 2
    for stranger in (b"", b"waker", b"\0" * 17, peer_record(5).identity):
        assert members.member_of(stranger) is members.introduced_as(stranger) is None


def test_a_worker_that_never_joins(members: Membership) -> None:
    members.introduce(peer_record(4))
    assert members.awaited == {4}
    assert members.living == [0, 1, 2, 3]
    assert members.member_of(peer_record(4).identity) is None
    members.mark_lost(4)
    assert not members.admit(4)
    assert not members.was_found(4)
    assert members.introduced_as(peer_record(4).identity) == 4
    assert (members.awaited, members.lost) == (set(), {4})
    assert members.living == [0, 1, 2, 3]
