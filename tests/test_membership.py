"""Who is in the mesh, and who is gone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zrpc.card import Card
from zrpc.errors import RpcError
from zrpc.membership import Membership
from zrpc.worker_info import WorkerInfo


def card(rank, *, host="host", directory=None, main="main", main_digest=""):
    return Card(
        name=f"worker{rank}",
        rank=rank,
        world_size=4,
        token=f"{rank:032x}",
        host_key=host,
        directory=f"/run/{rank}" if directory is None else directory,
        main=main,
        main_digest=main_digest,
    )


@pytest.fixture
def members():
    return Membership([card(rank) for rank in range(4)], rank=1)


@pytest.mark.parametrize("to", ["worker2", 2, WorkerInfo("worker2", 2), True + 1])
def test_find(members, to):
    assert members.find(to) == WorkerInfo("worker2", 2)


@pytest.mark.parametrize(
    "to", ["worker4", "", "Worker2", -1, 4, 99, WorkerInfo("worker2", 3), WorkerInfo("other", 9)]
)
def test_find_nobody(members, to):
    with pytest.raises(RpcError, match="could not find destination") as caught:
        members.find(to)
    assert repr(to) in str(caught.value)
    assert "worker0, worker1, worker2, worker3" in str(caught.value)


@pytest.mark.parametrize("to", [None, 1.0, b"worker1", ["worker1"], object()])
def test_find_by_something_else(members, to):
    with pytest.raises(ValueError, match="Cannot get WorkerInfo from name"):
        members.find(to)


def test_an_error_names_some_of_many_workers():
    many = Membership([card(rank) for rank in range(64)], rank=0)
    with pytest.raises(RpcError, match=r"worker7 and 56 more$"):
        many.find("nobody")


def test_identities(members):
    for rank in range(4):
        assert members.rank_of(card(rank).identity) == rank
    for stranger in (b"", b"waker", b"\0" * 17, card(5).identity):
        assert members.rank_of(stranger) is None


def test_an_identity_is_one_for_zeromq():
    assert card(0).identity[0] != 0  # which ZeroMQ keeps for itself
    assert len(card(0).identity) <= 255


def test_this_worker(members):
    assert members.info == WorkerInfo("worker1", 1)
    assert members.living == [0, 1, 2, 3]


def test_same_main():
    members = Membership([card(0), card(1), card(2, main="other")], rank=0)
    assert [members.same_main(rank) for rank in range(3)] == [True, True, False]
    text = [("main", "a"), ("main", "b"), ("other", "a"), ("other", "b"), ("other", "")]
    cards = [card(i, main=main, main_digest=text) for i, (main, text) in enumerate(text)]
    members = Membership(cards, rank=0)
    assert [members.same_main(rank) for rank in range(5)] == [True, True, True, False, False]


def test_shared_host():
    cards = [card(0), card(1), card(2, host="elsewhere"), card(3, directory="")]
    assert [Membership(cards, 0).shares_host(rank) for rank in range(4)] == [
        True,
        True,
        False,
        False,
    ]
    assert not Membership(cards, 3).shares_host(3)


def test_the_lost_are_no_members_any_more(members):
    identity = members.cards[2].identity
    assert members.rank_of(identity) == 2
    assert members.lost_rank_of(identity) is None
    for _ in range(2):
        members.lose(2)
        assert members.lost == {2}
        assert members.living == [0, 1, 3]
        assert members.rank_of(identity) is None
        assert members.lost_rank_of(identity) == 2
    assert members.rank_of(b"a stranger") is None
    assert members.lost_rank_of(b"a stranger") is None


def test_the_lost_can_still_be_found(members):
    # A call to them fails with WorkerDied, which says more than that there is no such worker.
    members.lose(2)
    assert members.find("worker2").id == 2


def test_a_worker_that_comes_later(members):
    late = card(4)
    members.introduce(late)
    assert members.awaited == {4}
    assert members.living == [0, 1, 2, 3]
    assert members.rank_of(late.identity) is None
    assert members.awaited_rank_of(late.identity) == 4
    with pytest.raises(RpcError):
        members.find("worker4")
    assert members.infos[4] == WorkerInfo("worker4", 4)
    assert members.same_main(4)
    assert [members.admit(4), members.admit(4)] == [True, False]
    assert members.living == [0, 1, 2, 3, 4]
    assert members.rank_of(late.identity) == members.find("worker4").number == 4
    assert members.awaited == set()


def test_a_worker_that_never_comes(members):
    members.introduce(card(4))
    members.lose(4)
    assert not members.admit(4)
    assert not members.was_found(4)
    assert members.awaited_rank_of(card(4).identity) is None
    assert members.lost_rank_of(card(4).identity) == 4
    assert members.living == [0, 1, 2, 3]


def test_another_incarnation_takes_the_name_and_the_rank(members):
    old, new = members.cards[2], replace(card(2), token="f" * 32, incarnation=1)
    members.introduce(new)
    assert members.find(2).number == old.number == 2
    members.lose(2)
    assert members.find("worker2").number == 2  # which is gone
    members.admit(new.number)
    for to in ("worker2", 2, WorkerInfo("worker2", 2), old.info):
        assert members.find(to).number == new.number
    assert members.rank_of(old.identity) is None
    assert members.rank_of(new.identity) == new.number
    assert members.living == [0, 1, 3, new.number]
