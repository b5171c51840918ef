"""How workers find each other, over each kind of store."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta

import pytest
import torch.distributed as dist

from zrpc.card import Card
from zrpc.entries import Entries
from zrpc.errors import RendezvousError
from zrpc.rendezvous import StoreLost, _digest, exchange, meet

SOON = 10.0
_tokens = itertools.count()


def card(rank, world_size, name=None, **changes):
    values = {
        "name": name or f"worker{rank}",
        "rank": rank,
        "world_size": world_size,
        "token": f"{next(_tokens):032x}",
        "host_key": "host",
        "directory": "/run",
        "main": "main",
    }
    return Card(**{**values, **changes})


@pytest.fixture(params=["hash", "file", "tcp"])
def connect(request, tmp_path):
    """A function that gives a worker its own connection to the store."""
    if request.param == "hash":
        store = dist.HashStore()
        yield lambda: store
    elif request.param == "file":
        yield lambda: dist.FileStore(str(tmp_path / "store"), -1)
    else:
        host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield lambda: dist.TCPStore("127.0.0.1", host.port, is_master=False)


def start(connect, cards, timeout=SOON):
    """Starts to meet; gives the cards found, or the error, when asked."""
    outcomes = {}

    def run(number, mine):
        try:
            outcomes[number] = meet(connect(), mine, timeout)
        except Exception as error:
            outcomes[number] = error

    threads = [
        threading.Thread(target=run, args=(n, mine), daemon=True) for n, mine in enumerate(cards)
    ]
    for thread in threads:
        thread.start()

    def finish():
        for thread in threads:
            thread.join(2 * SOON)
            assert not thread.is_alive(), "the rendezvous does not end"
        return [outcomes[n] for n in range(len(cards))]

    return finish


@pytest.mark.parametrize("size", [1, 2, 7])
def test_all_see_the_same_cards(connect, size):
    cards = [card(rank, size) for rank in range(size)]
    assert start(connect, cards)() == [cards] * size


def test_late_comers_are_waited_for(connect):
    cards = [card(rank, 3) for rank in range(3)]
    first = start(connect, cards[:2])
    assert start(connect, cards[2:])() == [cards]
    assert first() == [cards] * 2


def test_cards_of_an_earlier_mesh_are_not_taken(connect):
    # The store outlives the mesh, as torchrun's does.
    earlier = [card(rank, 3) for rank in range(3)]
    start(connect, earlier)()
    cards = [card(rank, 3) for rank in range(3)]
    first = start(connect, cards[:2])  # they see an old card of rank 2
    assert start(connect, cards[2:])() == [cards]
    assert first() == [cards] * 2


def test_a_worker_that_tries_again_is_met(connect):
    left_again = card(1, 2)
    [outcome] = start(connect, [left_again], timeout=0.05)()
    assert isinstance(outcome, RendezvousError)
    cards = [card(0, 2), card(1, 2)]
    assert start(connect, cards)() == [cards] * 2


def test_a_worker_that_tries_again_while_others_wait(connect):
    left_again = card(1, 3)
    waiting = [card(0, 3)]
    first = start(connect, waiting)
    [outcome] = start(connect, [left_again], timeout=0.05)()
    assert isinstance(outcome, RendezvousError)
    others = [card(1, 3), card(2, 3)]
    assert start(connect, others)() == [waiting + others] * 2
    assert first() == [waiting + others]


class PlayedHost:
    """Hosts the store, and plays all ranks but 1, which meets there."""

    def __init__(self, size):
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.entries = Entries(self._store, None)
        port = self._store.port
        self.cards = [card(rank, size) for rank in range(size)]
        for other in self.cards:
            if other.rank != 1:
                self.entries.set(f"card/{other.rank}", other.dump())
        self.digest = _digest(self.cards)
        self.outcome = start(
            lambda: dist.TCPStore("127.0.0.1", port, is_master=False), self.cards[1:2], 3 * SOON
        )

    def confirm(self):
        self.entries.set(f"{self.digest}/0", "met")

    def end(self):
        del self.entries, self._store
        begun = time.monotonic()
        [outcome] = self.outcome()
        assert time.monotonic() - begun < SOON
        return outcome


def test_a_host_that_has_met_the_others_and_ends():
    host = PlayedHost(2)
    host.confirm()
    host.entries.get(f"{host.digest}/1")  # waits for it
    assert host.end() == host.cards


def test_a_host_that_ends_before_it_knows_that_all_have_met():
    host = PlayedHost(3)
    host.confirm()
    host.entries.get(f"{host.digest}/1")
    error = host.end()
    assert isinstance(error, RendezvousError)
    assert not isinstance(error, StoreLost)
    assert f"which is {host.cards[0].info}, or the launcher" in str(error)


def of_an_ended_host():
    """A client's store, which nobody serves any more."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return dist.TCPStore("127.0.0.1", host.port, is_master=False)


def test_a_host_that_ends_before_all_have_said_where_they_listen():
    store = of_an_ended_host()
    with pytest.raises(RendezvousError, match="lost their store"):
        exchange(store, [card(0, 2), card(1, 2)], 1, "here", SOON)


def test_a_host_that_ends_and_may_be_that_of_an_earlier_mesh():
    host = PlayedHost(2)
    host.entries.get("card/1")
    assert isinstance(host.end(), StoreLost)


def test_missing_ranks_are_named(connect):
    [first, second] = start(connect, [card(0, 4), card(2, 4)], timeout=0.2)()
    for error in (first, second):
        assert isinstance(error, RendezvousError)
        assert "expected 4 workers within 0.2 s, but ranks [1, 3] are missing" in str(error)
        assert "RANK" in str(error)


def test_those_who_left_again_are_named(connect):
    stale = card(1, 2, name="gone")
    start(connect, [stale], timeout=0.05)()
    [error] = start(connect, [card(0, 2)], timeout=0.2)()
    assert isinstance(error, RendezvousError)
    assert "WorkerInfo(id=1, name=gone)" in str(error)
    assert "left again, or are from an earlier run" in str(error)


def test_one_name_twice(connect):
    for error in start(connect, [card(0, 2, name="same"), card(1, 2, name="same")])():
        assert isinstance(error, RendezvousError)
        assert "worker name same is not unique: ranks 0 and 1 both have it" in str(error)


def start_and_take_part_by_hand(connect):
    """Starts rank 0, and does what rank 1 of the same name does before it reads the verdict."""
    cards = [card(0, 2, name="same"), card(1, 2, name="same")]
    finish = start(connect, cards[:1])
    store = connect()
    entries, digest = Entries(store, None), _digest(cards)
    entries.set("card/1", cards[1].dump())
    entries.set(f"{digest}/1", "met")
    store.wait([f"zrpc/{digest}/0/refused"], timedelta(seconds=SOON))  # rank 0 knows
    return finish, lambda: entries.set(f"{digest}/1/refused", "1")


def test_rank_0_stays_until_the_others_have_read_why(connect):
    # With it the store might go, and the others would be told of a lost connection.
    finish, read = start_and_take_part_by_hand(connect)
    with ThreadPoolExecutor(1) as thread:
        outcome = thread.submit(finish)
        assert not wait([outcome], 0.2).done
        read()
        [error] = outcome.result(SOON)
    assert "worker name same is not unique" in str(error)


def test_rank_0_does_not_stay_for_the_dead(connect, monkeypatch):
    monkeypatch.setattr("zrpc.rendezvous._READ_WITHIN", 0.1)
    finish, _ = start_and_take_part_by_hand(connect)
    [error] = finish()
    assert "worker name same is not unique" in str(error)


def test_one_rank_twice():
    store = dist.HashStore()
    first, second = card(0, 2, name="first"), card(0, 2, name="second")
    outcomes = start(lambda: store, [first, second, card(1, 2)], timeout=1)()
    errors = [o for o in outcomes[:2] if isinstance(o, RendezvousError)]
    assert any("rank 0 is not unique: workers" in str(error) for error in errors)


def test_world_sizes_that_differ(connect):
    errors = start(connect, [card(0, 2), card(1, 3)], timeout=0.5)()
    for error in errors:
        assert isinstance(error, RendezvousError)
        assert "expects a world of" in str(error)
        assert "one of" in str(error)


def test_a_smaller_world_is_told(connect):
    # Rank 0 of two sees both, rank 2 of three waits for its own: each is told.
    errors = start(connect, [card(0, 2), card(1, 2), card(2, 3)], timeout=0.3)()
    assert not isinstance(errors[0], RendezvousError)
    assert isinstance(errors[2], RendezvousError)


@pytest.mark.parametrize("timeout", [0.0, 0.1])
def test_the_deadline_is_kept(connect, timeout):
    [error] = start(connect, [card(0, 2)], timeout=timeout)()
    assert isinstance(error, RendezvousError)
    assert f"within {timeout:g} s" in str(error)


def test_a_store_that_fails_is_a_rendezvous_error():
    with pytest.raises(RendezvousError, match="the store failed during the rendezvous"):
        meet(of_an_ended_host(), card(0, 1), 1)


def test_exchange(connect):
    cards = [card(rank, 3) for rank in range(3)]
    found = {}

    def run(rank):
        found[rank] = exchange(connect(), cards, rank, f"value {rank}", SOON)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(found.values()) == [["value 0", "value 1", "value 2"]] * 3


def test_who_gives_nothing_is_named(connect):
    cards = [card(rank, 3) for rank in range(3)]
    with pytest.raises(RendezvousError, match=r"within 0.1 s .*\[WorkerInfo\(id=1.*id=2"):
        exchange(connect(), cards, 0, "value", 0.1)


def test_exchanges_of_two_meshes_do_not_meet(connect):
    store = connect()
    for value in ("first", "second"):
        cards = [card(0, 1)]
        assert exchange(store, cards, 0, value, SOON) == [value]


def test_identities_are_as_zeromq_wants_them():
    identity = card(0, 1).identity
    assert identity[0:1] == b"z"
    assert identity.isascii()
    assert len(identity) == 23
